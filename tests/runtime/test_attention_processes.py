"""The same attention through real gloo processes and a real MPI: as exact as on threads."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from tests.dense import dense_attention, largest
from tests.helpers import run_mpi, run_processes
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.schedule.mask import make_mask

CONFIGS = {
    2: [{"route": "ring"}, {"route": "all_gather"}, {"ulysses_degree": 2, "route": "ring"}],
    4: [
        {"route": "ring"},
        {"route": {"name": "double_ring", "inner": 2}},
        {"route": {"name": "concentric", "team_size": 2}, "backward_moves": "queries"},
        {"route": {"name": "mesh", "rows": 2, "cols": 2}, "layout": "contiguous"},
        {"route": "all_gather", "backward_route": "ring"},
        {"route": "ring", "ulysses_degree": 2},
        {"route": "ring", "ulysses_degree": 2, "ulysses_stride": 2, "ulysses_chunks": 2},
        {"route": "auto", "ulysses_degree": 4},
    ],
}
MASKS = ({}, {"causal": True}, {"causal": True, "cu_seqlens": [0, 11, 30]}, {"window_size": (6, 0)})


def attend_everywhere(group, size):
    """The worst error of out, dq, dk, dv over every config and mask, in float64 and bfloat16."""
    worst = {torch.float64: 0.0, torch.bfloat16: 0.0}
    for words in CONFIGS[size]:
        config = SequenceParallelConfig.from_dict({"sequence_parallel_size": size, **words})
        sp = SequenceParallel(config, group)
        for mask in MASKS:
            for dtype in worst:
                worst[dtype] = largest((worst[dtype], error(sp, mask, dtype)))
    return worst


def error(sp, mask, dtype):
    random = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, 30, heads, 16, generator=random, dtype=torch.float64)
        for heads in (8, 4, 4, 8)
    )
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    out = sp.unshard(sp.attention(sp.shard(q), sp.shard(k), sp.shard(v), **mask))
    found = [out, *torch.autograd.grad((out * dout.to(dtype)).sum(), (q, k, v))]
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    right = dense_attention(*wide, make_mask(**mask), 0.25)
    wanted = [right, *torch.autograd.grad((right * dout).sum(), wide)]
    return largest((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True))


def attend_on_gloo(comm, size):
    return attend_everywhere(None, size)


@pytest.mark.processes
@pytest.mark.parametrize("size", (2, 4))
def test_exact_over_gloo(size):
    for worst in run_processes(size, attend_on_gloo, size):
        assert worst[torch.float64] < 1e-10
        assert worst[torch.bfloat16] < 0.1


@pytest.mark.mpi
@pytest.mark.parametrize("size", (2, 4))
def test_exact_over_mpi(size):
    for worst in run_mpi(size, attend_everywhere, size):
        assert worst[torch.float64] < 1e-10
        assert worst[torch.bfloat16] < 0.1


def lose_a_rank(comm):
    """Rank 2 dies after one good call; what the others then say, and how soon."""
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=4, route="ring"))
    x = torch.randn(1, 16, 2, 16, requires_grad=True)
    sp.attention(x, x, x, causal=True)
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        for _ in range(3):
            sp.attention(x, x, x, causal=True).sum().backward()
    except RuntimeError as failure:
        return str(failure), time.monotonic() - start
    return "finished", 0.0


@pytest.mark.processes
def test_a_dead_rank_ends_the_job_on_every_rank_and_is_named(tmp_path):
    with pytest.raises(RuntimeError) as failure:
        run_processes(4, report_loss, str(tmp_path), group_timeout=8)
    assert "2" in str(failure.value)  # the exit code of rank 2 itself
    for rank in (0, 1, 3):
        said, seconds = (tmp_path / str(rank)).read_text().split("\n", 1)[0].rsplit(" ", 1)
        assert f"rank {rank}" in said and float(seconds) < 20, said
    everyone = " ".join((tmp_path / str(rank)).read_text() for rank in (0, 1, 3))
    assert "rank 2" in everyone and "agreement" in everyone


def report_loss(comm, folder):
    said, seconds = lose_a_rank(comm)
    with open(os.path.join(folder, str(comm.rank)), "w") as file:
        file.write(said.replace("\n", " ") + f" {seconds:.2f}\n")


def agree_on_nothing(comm):
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=2, route="ring"))
    x = torch.zeros(1, 8, 2 + 2 * comm.rank, 16)
    try:
        sp.attention(x, x, x)
    except ValueError as refusal:
        return str(refusal)


@pytest.mark.processes
def test_shapes_that_differ_between_processes_are_named_not_waited_for():
    for said in run_processes(2, agree_on_nothing):
        assert "heads: [2, 4]" in said


def disagree_in_every_way(comm):
    """A shape that rank 1 alone refuses, then batches of other keys: never a wait, nor an abort."""
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=2, route="ring"), comm)
    x, ids = torch.zeros(1, 8, 4, 16), torch.zeros(1, 8, dtype=torch.int64)
    k = x[:, :, : 4 - comm.rank]
    batch = {"input_ids": ids} | ({"labels": ids, "extra": ids} if comm.rank else {})
    said = []
    for call in (lambda: sp.attention(x, k, k), lambda: sp.shard_batch(batch)):
        try:
            call()
        except ValueError as refusal:
            said.append(" ".join([str(refusal), *getattr(refusal, "__notes__", ())]))
    sp.attention(x, x, x)
    return said


@pytest.mark.processes
@pytest.mark.parametrize("run", (run_processes, pytest.param(run_mpi, marks=pytest.mark.mpi)))
def test_what_one_process_alone_refuses_raises_on_all(run):
    (heads, keys), (own, _) = run(2, disagree_in_every_way)
    assert "ranks [1] refuse" in heads and "kv heads must divide heads, got 3 and 4" in own
    assert "keys of the batch: [" in keys
    assert "on rank 0 of 2: ['cu_seqlens', 'input_ids', 'position_ids']" in keys
