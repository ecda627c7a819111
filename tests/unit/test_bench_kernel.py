"""What a rank's tiles take: a line through a tiny tile's time and a long one's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from wf_backends.bench_kernel import HEAD_DIM, HEADS, TILES, kernel_rate

SMALL, LARGE = TILES


def test_a_line_through_two_times() -> None:
    """A call of 2 ms forward and 4 ms backward beside 1e12 and 2e12 FLOP/s."""
    flops = [4 * size * size * HEADS * HEAD_DIM for size in TILES]
    calls = [
        seconds
        for call, rate in ((2e-3, 1e12), (4e-3, 2e12 / 2.5))
        for seconds in ((LARGE // SMALL) * (call + flops[0] / rate), call + flops[1] / rate)
    ]
    told = iter(calls)

    def seconds_of(work: Callable[[], object]) -> float:
        work()  # the tiles themselves run
        return next(told)

    name, rate = kernel_rate(torch.device("cpu"), seconds_of)
    assert name == "sdpa"
    assert rate.forward_flops_per_s == pytest.approx(1e12)
    assert rate.backward_flops_per_s == pytest.approx(2e12)
    assert rate.call_s == pytest.approx(3e-3)


def test_times_that_make_no_line_still_give_rates() -> None:
    """Noise: the tiny tiles took longer than the long one."""
    told = iter((64.0, 1e-3, 64.0, 1e-3))
    _, rate = kernel_rate(torch.device("cpu"), lambda work: next(told))
    assert 0 < rate.forward_flops_per_s < 1e15 and rate.call_s > 0
