"""What a rank's tiles take: a line through a tiny and a long tile's times, and a causal one's."""

from __future__ import annotations

import pytest
import torch

from wf_backends.cluster.measure_kernels import CPU, HEAD_DIM, KernelTimer
from wf_backends.cluster.timer import Work
from wf_backends.cluster.topology import KernelRate
from wf_backends.lowering.areas import BACKWARD_FLOPS

FLOPS = 4 * CPU.heads * HEAD_DIM  # of a (query, key) pair


def rate_of(*told: float) -> KernelRate:
    """By times in the order in which they are asked for: what is timed runs, too."""
    times = iter(told)

    def seconds(work: Work, series_s: float) -> float:
        assert series_s == CPU.series_s
        work()
        return next(times)

    bench = KernelTimer(torch.device("cpu"))
    assert bench.kernel.name == "sdpa"
    found = bench.rate(seconds)
    assert not list(times)
    return found


def lines(*calls_and_rates: tuple[float, float]) -> list[float]:
    """Times of a small and of a large tile, of kernels with such a call and rate."""
    return [
        seconds
        for call, rate in calls_and_rates
        for seconds in (
            call + FLOPS * CPU.small**2 / rate,
            call + FLOPS * CPU.large**2 / rate,
        )
    ]


@pytest.mark.parametrize("in_vain", (0, 100))
def test_a_line_through_two_times_and_a_diagonal(in_vain: int) -> None:
    """A call of 2 ms forward and 4 ms backward beside 1e12 and 2e12 FLOP/s."""
    rates = 1e12, 2e12 / BACKWARD_FLOPS
    n = CPU.diagonal
    scores = n * (n + 1) / 2 + n * in_vain
    causal = 6e-3 + scores * FLOPS * sum(1 / rate for rate in rates)
    rate = rate_of(*lines((2e-3, rates[0]), (4e-3, rates[1])), causal)
    assert rate.forward_flops_per_s == pytest.approx(1e12)
    assert rate.backward_flops_per_s == pytest.approx(2e12)
    assert rate.call_s == pytest.approx(3e-3)
    assert rate.diagonal_keys == pytest.approx(in_vain, abs=1e-3)


def test_times_that_make_no_line_still_give_rates() -> None:
    """Noise: the tiny tiles took longer than the long one, and a causal one no time."""
    rate = rate_of(1.0, 1e-3, 1.0, 1e-3, 1e-9)
    assert 0 < rate.forward_flops_per_s < 1e15 and rate.call_s > 0
    assert rate.diagonal_keys == 0
