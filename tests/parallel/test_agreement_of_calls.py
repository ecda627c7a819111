"""Ranks that leave out a call, or take backwards in another order: an error names the calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers import run_threads
from wf_backends import SequenceParallel, SequenceParallelConfig

RANKS = 3


def run_layers(comm: Any, rank_1_skips: bool) -> None:
    """Attention of four named layers; rank 1 may skip the second."""
    config = SequenceParallelConfig(sequence_parallel_size=comm.size, route="ring")
    sp = SequenceParallel(config, comm)
    x = torch.zeros(1, 8, 4, 8)
    for index in range(4):
        if rank_1_skips and comm.rank == 1 and index == 1:
            continue
        x = x + sp.attention(x, x, x, name=f"layers.{index}")


def test_error_names_the_layer_that_one_rank_skips() -> None:
    run_threads(RANKS, run_layers, False)
    with pytest.raises(ValueError, match=r"layer 'layers.1' \(ranks \[0, 2\]\), layer 'layers.2'"):
        run_threads(RANKS, run_layers, True)


@pytest.mark.parametrize("last_call", ["shard_batch", "unshard"])
def test_skipped_call_without_a_name_is_an_error_in_the_next_call_of_another_type(
    last_call: str,
) -> None:
    """Calls without names look alike: only the call after them shows that one is missing."""

    def rank(comm: Any, rank_1_skips: bool) -> None:
        config = SequenceParallelConfig(sequence_parallel_size=comm.size, route="ring")
        sp = SequenceParallel(config, comm)
        ids = torch.zeros(1, 24, dtype=torch.int64)
        x = sp.shard_batch({"input_ids": ids})["input_ids"][..., None, None].repeat(1, 1, 4, 8)
        x = x.float()
        for index in range(3):
            if not (rank_1_skips and comm.rank == 1 and index == 1):
                x = sp.attention(x, x, x)
        sp.unshard(x) if last_call == "unshard" else sp.shard_batch({"input_ids": ids})

    run_threads(RANKS, rank, False)
    with pytest.raises(ValueError, match="A rank that leaves out a call"):
        run_threads(RANKS, rank, True)


CONFIGS = [
    {"route": "ring"},
    {"ulysses_degree": 2},
    {"ulysses_degree": 2, "ulysses_chunks": 2},
    {"strategy": "lss"},
]


@pytest.mark.parametrize("options", CONFIGS)
@pytest.mark.parametrize("order", [(1, 0), (1,)], ids=["another order", "not at all"])
def test_backwards_in_different_orders_are_an_error_that_names_the_layers(
    options: dict[str, Any], order: tuple[int, ...]
) -> None:
    """The messages of both layers have equal shapes: only the check of the order sees it."""

    def rank(comm: Any, order_of_rank_1: tuple[int, ...]) -> None:
        config = SequenceParallelConfig.from_dict({"sequence_parallel_size": 2} | options)
        sp = SequenceParallel(config, comm)
        x = torch.zeros(1, 8, 4, 8, requires_grad=True)
        outs = [sp.attention(x, x, x, name=name) for name in "ab"]
        for layer in order_of_rank_1 if comm.rank == 1 else (0, 1):
            outs[layer].sum().backward()

    run_threads(2, rank, (0, 1))
    message = r"layer '[ab]', backward of attention call \d, .* layer '[ab]', backward of"
    with pytest.raises(RuntimeError, match=message):
        run_threads(2, rank, order)


@pytest.mark.parametrize("needing", ["x", "sinks"])
def test_a_gradient_that_not_all_ranks_need_is_an_error_before_a_backward_waits(
    needing: str,
) -> None:
    def rank(comm: Any) -> None:
        config = SequenceParallelConfig(sequence_parallel_size=RANKS, route="ring")
        sp = SequenceParallel(config, comm)
        inputs = {"x": torch.zeros(1, 8, 4, 8), "sinks": torch.zeros(4)}
        inputs[needing].requires_grad_(comm.rank == 1)
        x, sinks = inputs.values()
        out = sp.attention(x, x, x, sinks=sinks)
        if out.requires_grad:
            out.sum().backward()

    message = r"needs a gradient: False \(ranks \[0, 2\]\), True \(ranks \[1\]\)"
    with pytest.raises(ValueError, match=message):
        run_threads(RANKS, rank, timeout=5.0)
