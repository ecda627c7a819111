"""DSP, the layout tracker and LSS on gloo processes and on a real MPI, as on threads."""

from __future__ import annotations

import pytest

from tests.dense import largest
from tests.dsp.stage_models import ORDERS, step_on_one_device, step_under_tracker
from tests.dsp.switch_cases import derived_bytes, errors_and_bytes
from tests.dsp.video import RING, SWITCH, TWO_PAIRS, small_video, train_video
from tests.helpers import run_mpi, run_processes
from tests.parallel.test_lss import attend
from wf_backends.comm import make_comm

SWITCHES = [((2, 9, 11, 3), (1, 2)), ((2, 1, 5, 3), (1, 2)), ((9, 7, 10), (0, 2, 1))]
"""(shape, path)."""
TWO_ORDERS = [order for order, _ in ORDERS[:2]]
VIDEOS = [
    small_video(TWO_PAIRS, SWITCH),
    small_video(("space", "full", "time"), {"switch": True, "wallfacer": RING}, frames=4, width=32),
]
MASKS = ({}, {"causal": True}, {"causal": True, "cu_seqlens": [0, 3, 20, 37]})


def run_on_rank(group):
    """(errors and bytes of switches, errors of LSS, steps under a tracker, losses of videos)."""
    comm = make_comm(group)
    switched = []
    for shape, path in SWITCHES:
        comm.sent.clear()
        errors, sent = errors_and_bytes(comm, shape, path)
        switched.append((errors, {label: n for label, n in sent.items() if n}))
    lss_errors = [attend(comm, "zigzag", mask)[0] for mask in MASKS]
    steps = [step_under_tracker(comm, order, checkpointed=True)[:2] for order in TWO_ORDERS]
    return switched, lss_errors, steps, losses_of_videos(comm)


def losses_of_videos(comm):
    return [train_video.train(comm, config, 2) for config in VIDEOS]


def check_ranks(results):
    """Check what `run_on_rank` returned on all ranks."""
    expected_steps = [step_on_one_device(order) for order in TWO_ORDERS]
    expected_losses = losses_of_videos(make_comm())
    for rank, (switched, lss_errors, steps, losses) in enumerate(results):
        for (errors, sent), (shape, path) in zip(switched, SWITCHES, strict=True):
            assert largest(errors) < 1e-10
            assert sent == derived_bytes(shape, path, len(results), rank)
        assert largest(lss_errors) < 1e-10
        for (out, grads), (expected_out, expected_grads) in zip(steps, expected_steps, strict=True):
            assert (out - expected_out).abs().max() < 1e-10
            for grad, expected in zip(grads, expected_grads, strict=True):
                assert (grad - expected).abs().max() < 1e-10
        for video_losses, expected in zip(losses, expected_losses, strict=True):
            assert video_losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.processes
def test_strategies_are_exact_over_gloo():
    check_ranks(run_processes(4, run_on_rank))


@pytest.mark.mpi
def test_strategies_are_exact_over_mpi():
    check_ranks(run_mpi(2, run_on_rank))
