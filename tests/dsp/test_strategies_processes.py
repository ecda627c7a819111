"""DSP, the layout tracker and LSS through real gloo processes and a real MPI, as on threads."""

from __future__ import annotations

import pytest

from tests.dense import largest
from tests.dsp.test_stages import ORDERS, step
from tests.dsp.test_switch import derived_bytes, there_and_back
from tests.dsp.test_video_dit import RING, TWO, small, train_video
from tests.helpers import run_mpi, run_processes
from tests.parallel.test_lss import attend
from wf_backends.comm import make_comm

SWITCHES = [((2, 9, 11, 3), (1, 2)), ((2, 1, 5, 3), (1, 2)), ((9, 7, 10), (0, 2, 1))]
VIDEOS = [
    small(TWO, {"switch": True}),
    small(("space", "full", "time"), {"switch": True, "wallfacer": RING}, frames=4, width=32),
]
MASKS = ({}, {"causal": True}, {"causal": True, "cu_seqlens": [0, 3, 20, 37]})


def everything(group):
    """What every piece gives on this rank: results to compare, in the order of `check`."""
    comm = make_comm(group)
    switched = []
    for shape, path in SWITCHES:
        comm.sent.clear()
        errors, sent = there_and_back(comm, shape, path)
        switched.append((errors, {k: v for k, v in sent.items() if v}))
    attended = [attend(comm, "zigzag", mask)[0] for mask in MASKS]
    staged = [step(comm, order, checkpointed=True)[:2] for order, _ in ORDERS[:2]]
    return switched, attended, staged, train_videos(comm)


def check(results):
    size = len(results)
    alone = [step(None, order, checkpointed=False) for order, _ in ORDERS[:2]]
    one_rank = train_videos(make_comm())
    for rank, (switched, attended, staged, video) in enumerate(results):
        for (errors, sent), (shape, path) in zip(switched, SWITCHES, strict=True):
            assert largest(errors) < 1e-10
            assert sent == derived_bytes(shape, path, size, rank)
        assert largest(attended) < 1e-10
        for (out, grads), (right, wanted, _) in zip(staged, alone, strict=True):
            assert (out - right).abs().max() < 1e-10
            assert all((a - b).abs().max() < 1e-10 for a, b in zip(grads, wanted, strict=True))
        for losses, wanted in zip(video, one_rank, strict=True):
            assert losses == pytest.approx(wanted, abs=1e-5)


def train_videos(comm):
    return [train_video.train(comm, words, 2) for words in VIDEOS]


@pytest.mark.processes
def test_exact_over_gloo():
    check(run_processes(4, everything))


@pytest.mark.mpi
def test_exact_over_mpi():
    check(run_mpi(2, everything))
