"""Attention on processes, over gloo and MPI: exact, and errors of one rank reach the others."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

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


def worst_errors(group, size):
    """By dtype, over all configs and masks and out, dq, dk, dv."""
    worst = {torch.float64: 0.0, torch.bfloat16: 0.0}
    for options in CONFIGS[size]:
        config = SequenceParallelConfig.from_dict({"sequence_parallel_size": size, **options})
        sp = SequenceParallel(config, group)
        for mask in MASKS:
            for dtype in worst:
                worst[dtype] = largest((worst[dtype], error_of_call(sp, mask, dtype)))
    return worst


def error_of_call(sp, mask, dtype):
    """The largest error of out, dq, dk and dv, against dense attention in float64."""
    random = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, 30, heads, 16, generator=random, dtype=torch.float64)
        for heads in (8, 4, 4, 8)
    )
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    out = sp.unshard(sp.attention(sp.shard(q), sp.shard(k), sp.shard(v), **mask))
    actual = [out, *torch.autograd.grad((out * dout.to(dtype)).sum(), (q, k, v))]
    inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    dense = dense_attention(*inputs, make_mask(**mask), 0.25)
    expected = [dense, *torch.autograd.grad((dense * dout).sum(), inputs)]
    return largest((a - b).abs().max().item() for a, b in zip(actual, expected, strict=True))


def worst_errors_on_gloo(comm, size):
    return worst_errors(None, size)


def assert_exact(errors_by_rank):
    """bfloat16: elements reach 5 and are rounded to 2**-8."""
    for errors in errors_by_rank:
        assert errors[torch.float64] < 1e-10
        assert errors[torch.bfloat16] < 0.1


@pytest.mark.processes
@pytest.mark.parametrize("size", (2, 4))
def test_attention_is_exact_over_gloo(size):
    assert_exact(run_processes(size, worst_errors_on_gloo, size))


@pytest.mark.mpi
@pytest.mark.parametrize("size", (2, 4))
def test_attention_is_exact_over_mpi(size):
    assert_exact(run_mpi(size, worst_errors, size))


def attend_until_rank_2_dies(comm, folder):
    """Rank 2 kills itself after one call; the others write their error and the seconds to it."""
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=4, route="ring"))
    x = torch.randn(1, 16, 2, 16, requires_grad=True)
    sp.attention(x, x, x, causal=True)
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    error = "finished"
    try:
        for _ in range(3):
            sp.attention(x, x, x, causal=True).sum().backward()
    except RuntimeError as failure:
        error = str(failure)
    report = {"error": error, "seconds": time.monotonic() - start}
    Path(folder, f"{comm.rank}.json").write_text(json.dumps(report))


@pytest.mark.processes
def test_a_killed_rank_is_an_error_on_every_rank_within_20_seconds(tmp_path):
    """Messages time out after 8 s. The error on a neighbour names rank 2."""
    with pytest.raises(RuntimeError) as failure:
        run_processes(4, attend_until_rank_2_dies, str(tmp_path), group_timeout=8)
    assert "rank 2: ended with exit code -9" in str(failure.value)
    reports = {rank: json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1, 3)}
    for rank, report in reports.items():
        assert f"rank {rank}" in report["error"] and report["seconds"] < 20, report
    errors = " ".join(report["error"] for report in reports.values())
    assert "rank 2" in errors and "agreement" in errors


def refusal_of_other_heads(comm):
    """The error where rank 0 has 2 heads and rank 1 has 4."""
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=2, route="ring"))
    x = torch.zeros(1, 8, 2 + 2 * comm.rank, 16)
    with pytest.raises(ValueError) as refusal:
        sp.attention(x, x, x)
    return str(refusal.value)


@pytest.mark.processes
def test_shapes_that_differ_between_processes_are_refused_with_all_of_them():
    for error in run_processes(2, refusal_of_other_heads):
        assert "heads: [2, 4]" in error


def refusals_of_attention_and_batch(group):
    """The errors, with notes, of two calls of two ranks; a good call follows.

    Rank 1 refuses its own shapes in the first. In the second its batch has other keys.
    """
    config = SequenceParallelConfig(sequence_parallel_size=2, route="ring")
    sp = SequenceParallel(config, group)
    x, ids = torch.zeros(1, 8, 4, 16), torch.zeros(1, 8, dtype=torch.int64)
    k = x[:, :, : 4 - sp.rank]
    batch = {"input_ids": ids} | ({"labels": ids, "extra": ids} if sp.rank == 1 else {})
    errors = []
    for call in (lambda: sp.attention(x, k, k), lambda: sp.shard_batch(batch)):
        with pytest.raises(ValueError) as refusal:
            call()
        errors.append(str(refusal.value))
    sp.attention(x, x, x)
    return errors


@pytest.mark.processes
@pytest.mark.parametrize("run", (run_processes, pytest.param(run_mpi, marks=pytest.mark.mpi)))
def test_what_one_process_refuses_is_an_error_on_all(run):
    of_rank_0, of_rank_1 = run(2, refusals_of_attention_and_batch)
    assert "ranks [1] refuse" in of_rank_0[0]
    assert "kv heads must divide heads, got 3 and 4" in of_rank_1[0]
    assert "keys of the batch: [" in of_rank_0[1]
    assert "['input_ids', 'position_ids'] (ranks [0])" in of_rank_0[1]
