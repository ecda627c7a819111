"""The time of operators, whole and in slices, by a roofline with measured rates."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from wf_backends.autochunk.capture import tensors
from wf_backends.autochunk.flow import Sliced

_SQUARE = 512  # rows of the matrices that are multiplied to find the rate of arithmetic
_STREAM = 1 << 22  # elements that are copied to find the rate of memory


@dataclass(frozen=True)
class Rates:
    """What a device does: seconds to launch an operator, flops and bytes a second."""

    launch_seconds: float = 5e-6
    flops_per_s: float = 2e14
    bytes_per_s: float = 2e12

    def seconds(self, flops: float, count: float) -> float:
        """The time of an operator that computes `flops` and moves `count` bytes."""
        return self.launch_seconds + max(flops / self.flops_per_s, count / self.bytes_per_s)


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """The rates of this device, in about 50 ms. Fake and meta devices get those of one GPU."""
    if device.type != "cpu" and not torch.accelerator.is_available():
        return Rates()
    small = torch.zeros(1, dtype=dtype, device=device)
    square = torch.zeros(_SQUARE, _SQUARE, dtype=dtype, device=device)
    stream = torch.zeros(_STREAM, dtype=dtype, device=device)
    launch = _seconds(lambda: small + small, device)
    return Rates(
        launch,
        2 * _SQUARE**3 / _seconds(lambda: square @ square, device),
        2 * stream.nbytes / _seconds(lambda: stream + 1, device),
    )


def _seconds(run: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """The least of a few runs."""
    least = float("inf")
    run()
    for _ in range(repeats):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        least = min(least, time.perf_counter() - start)
    return least


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def operator_seconds(op: Sliced, flops: int, rates: Rates, chunks: int) -> float:
    """The time of an operator in so many slices: what is read whole is read for every slice."""
    sliced = sum(t.nbytes for t in tensors(op.node))
    whole = 0
    for source in op.sources:
        count = sum(t.nbytes for t in tensors(source.node))
        sliced, whole = (sliced, whole + count) if source.dim is None else (sliced + count, whole)
    return chunks * rates.seconds(flops / chunks, sliced / chunks + whole)
