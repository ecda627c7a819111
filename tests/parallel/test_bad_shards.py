"""Arguments of shard, unshard, positions, shard_batch and loss that are refused by name."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import run_threads
from wf_backends import SequenceParallel, SequenceParallelConfig


def one_rank(**options):
    return SequenceParallel(SequenceParallelConfig(**options))


def test_a_sequence_shorter_than_the_chunks_of_its_layout_is_refused():
    """Zigzag on 4 ranks has 8 chunks."""
    config = SequenceParallelConfig(sequence_parallel_size=4, layout="zigzag")

    def rank(comm):
        SequenceParallel(config, comm).shard(torch.zeros(1, 7, 1, 8))

    with pytest.raises(ValueError, match="7 tokens is too short for the zigzag layout on 4 ranks"):
        run_threads(4, rank)


def test_unshard_refuses_tensors_that_are_no_shards():
    def rank(comm):
        sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=2), comm)
        sp.unshard(torch.zeros(1, 3 + 4 * comm.rank, 2))

    with pytest.raises(ValueError, match=r"must be the shards of the zigzag layout.*got \[3, 7\]"):
        run_threads(2, rank)


@pytest.mark.parametrize("method", ("shard", "unshard"))
def test_a_dim_that_the_tensor_lacks_is_refused(method):
    message = r"dim must be one of the 1 dimensions of a tensor \(8,\), got 1"
    with pytest.raises(ValueError, match=message):
        getattr(one_rank(), method)(torch.zeros(8))


@pytest.mark.parametrize("method", ("shard", "unshard"))
@pytest.mark.parametrize("dim", ("1", 1.0, None))
def test_a_dim_that_is_no_integer_is_refused(dim, method):
    with pytest.raises(ValueError, match="dim must be one of the 2 dimensions"):
        getattr(one_rank(), method)(torch.zeros(2, 8), dim)


class LikeDTensor(torch.Tensor):
    def to_local(self):
        raise AssertionError


@pytest.mark.parametrize("method", ("shard", "unshard"))
def test_a_dtensor_is_refused(method):
    """Ranks would wait for each other in its operators, as each takes other rows."""
    with pytest.raises(ValueError, match="got a DTensor: pass x.full_tensor"):
        getattr(one_rank(), method)(torch.zeros(2, 8).as_subclass(LikeDTensor))


@pytest.mark.parametrize("seqlen", ("8", 8.0, True, None, 0, -8))
def test_positions_of_a_seqlen_that_is_no_positive_integer_are_refused(seqlen):
    with pytest.raises(ValueError, match="seqlen must be a positive integer, got"):
        one_rank().positions(seqlen)


@pytest.mark.parametrize(
    "batch", ([torch.zeros(1, 8)], None, torch.zeros(1, 8)), ids=("list", "None", "tensor")
)
def test_a_batch_that_is_no_dict_is_refused(batch):
    with pytest.raises(ValueError, match='a batch must be such as {"input_ids": ids}, got a'):
        one_rank().shard_batch(batch)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bool))
def test_labels_that_are_no_integers_are_refused(dtype):
    with pytest.raises(ValueError, match=f"labels must be integers, got {dtype}"):
        one_rank().loss(torch.zeros(1, 8, 5), torch.zeros(1, 8, dtype=dtype))


@pytest.mark.parametrize("layout", ("zigzag", "document_zigzag"))
@pytest.mark.parametrize("method", ("shard", "unshard", "positions"))
@pytest.mark.parametrize(
    "borders",
    ([0, 5, 3, 8], [0, 4, 4, 8], [2, 8], [0, 8.5], torch.tensor([0, 8]), []),
    ids=("decreasing", "empty document", "no 0", "fraction", "tensor", "empty"),
)
def test_shard_unshard_and_positions_refuse_cu_seqlens_that_are_no_borders(layout, method, borders):
    """Under document_zigzag such borders would give a row two owners, or none."""
    argument = 8 if method == "positions" else torch.zeros(1, 8)
    with pytest.raises(ValueError, match="cu_seqlens must be"):
        getattr(one_rank(layout=layout), method)(argument, cu_seqlens=borders)
