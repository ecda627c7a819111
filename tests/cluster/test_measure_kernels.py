"""Rates of a kernel: from the times of a small, a large and a causal tile."""

from __future__ import annotations

import pytest
import torch

from wf_backends.cluster.measure_kernels import CPU, HEAD_DIM, KernelTimer
from wf_backends.cluster.timer import Work
from wf_backends.cluster.topology import KernelRate
from wf_backends.lowering.areas import BACKWARD_FLOPS

FLOPS_PER_PAIR = 4 * CPU.heads * HEAD_DIM  # of (query, key)


def rate_from(*tile_times: float) -> KernelRate:
    """The rate that a timer computes if its measurements give these times, one after another."""
    times = iter(tile_times)

    def seconds(work: Work, series_s: float) -> float:
        assert series_s == CPU.series_s
        work()
        return next(times)

    timer = KernelTimer(torch.device("cpu"))
    assert timer.kernel.name == "sdpa"
    rate = timer.rate(seconds)
    assert not list(times)
    return rate


def small_and_large(call_s: float, flops_per_s: float) -> list[float]:
    """The times of a small and of a large tile."""
    return [call_s + FLOPS_PER_PAIR * rows**2 / flops_per_s for rows in (CPU.small, CPU.large)]


@pytest.mark.parametrize("diagonal_keys", (0, 100))
def test_rates_are_computed_from_five_times(diagonal_keys: int) -> None:
    """Calls of 2 ms and 4 ms; a row of a causal tile computes `diagonal_keys` that it masks out."""
    forward, backward = 1e12, 2e12 / BACKWARD_FLOPS
    rows = CPU.diagonal
    pairs = rows * (rows + 1) / 2 + rows * diagonal_keys
    causal_s = 2e-3 + 4e-3 + pairs * FLOPS_PER_PAIR * (1 / forward + 1 / backward)
    rate = rate_from(*small_and_large(2e-3, forward), *small_and_large(4e-3, backward), causal_s)
    assert rate.forward_flops_per_s == pytest.approx(1e12)
    assert rate.backward_flops_per_s == pytest.approx(2e12)
    assert rate.call_s == pytest.approx(3e-3)  # the mean
    assert rate.diagonal_keys == pytest.approx(diagonal_keys, abs=1e-3)


def test_noisy_times_still_give_positive_rates() -> None:
    """The small tiles took longer than the large ones, and a causal tile took no time."""
    rate = rate_from(1.0, 1e-3, 1.0, 1e-3, 1e-9)
    assert 0 < rate.forward_flops_per_s < 1e15 and rate.call_s > 0
    assert rate.diagonal_keys == 0
