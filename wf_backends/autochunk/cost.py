"""The time of operators, whole and in slices, by a roofline with measured rates."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from wf_backends.graph import nbytes
from wf_backends.slicing import Sliced, is_interleaved

_SQUARE = 256  # rows of the matrices that are multiplied to find the rate of arithmetic
_WIDE = 2048  # rows of a matrix that no cache holds
_FEW = 16  # rows that are multiplied with it
_BATCH, _ROWS = 32, 128  # of the products that are summed over neither's innermost dimension
_RUNS = 10  # of which the least time counts
_ENOUGH = 0.05  # seconds after which no further run is timed: 16-bit products on some CPUs


@dataclass(frozen=True)
class Rates:
    """What a device does: seconds to launch an operator, flops a second, bytes a second that are
    read or written, bytes a second of a large matrix with which few rows are multiplied, and bytes
    a second of a batch of matrices whose innermost dimension is the batch: libraries copy it."""

    launch_seconds: float = 5e-6
    flops_per_s: float = 2e14
    bytes_per_s: float = 2e12
    packed_bytes_per_s: float = 2e12
    interleaved_bytes_per_s: float = 5e11

    def seconds(self, flops: float, count: float) -> float:
        """The time of an operator that moves `count` bytes and computes `flops`."""
        return self.launch_seconds + max(flops / self.flops_per_s, count / self.bytes_per_s)

    def packing_seconds(self, count: float) -> float:
        """The time that a slice of few rows takes for a matrix of `count` bytes that it is
        multiplied with: libraries pack it first. What caches hold is packed faster, by the root of
        its size (torch on a CPU, 256 KiB to 16 MiB)."""
        share = count / (4 * _WIDE**2)
        return count * min(1.0, share**0.5) / self.packed_bytes_per_s


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """The rates of this device, in about 200 ms (16 bits on some CPUs: 2 s). Fake and meta devices
    get those of one GPU."""
    if device.type != "cpu" and not torch.accelerator.is_available():
        return Rates()
    small = torch.zeros(1, dtype=dtype, device=device)
    square = torch.zeros(_SQUARE, _SQUARE, dtype=dtype, device=device)
    wide = torch.zeros(_WIDE, _WIDE, dtype=dtype, device=device)
    launch = _seconds(lambda: small + small, device)
    flops = 2 * _SQUARE**3 / _seconds(lambda: square @ square, device)
    few = _seconds(lambda: wide[:_FEW] @ wide, device) - 2 * _FEW * _WIDE**2 / flops
    mixed = torch.zeros(_ROWS, _ROWS, _BATCH, dtype=dtype, device=device)
    row = _seconds(lambda: torch.einsum("ikc,jkc->ijc", mixed[:1], mixed), device)
    return Rates(
        launch,
        flops,
        2 * wide.nbytes / _seconds(lambda: wide + 1, device),
        wide.nbytes / max(few, launch),
        mixed.nbytes / row,
    )


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The least of a few runs."""
    took: list[float] = []
    run()
    while len(took) < _RUNS and sum(took) < _ENOUGH:
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        took.append(time.perf_counter() - start)
    return min(took)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@dataclass(frozen=True)
class Cost:
    """The seconds of an operator in slices: of its arithmetic, of moving what is sliced, of moving
    for every slice what is not, and of launching each slice."""

    arithmetic: float
    moved: float
    each: float
    launch: float

    @staticmethod
    def of(op: Sliced, flops: int, rates: Rates) -> Cost:
        """What a product reads whole is packed, or copied, for every slice."""
        moved, each, launch = nbytes(op.node), 0, rates.launch_seconds
        for source in op.sources:
            count = nbytes(source.node)
            if source.dim is not None:
                moved += count
            elif is_interleaved(op.node, source.node):
                launch += count / rates.interleaved_bytes_per_s
            elif flops:
                launch += max(rates.packing_seconds(count), count / rates.bytes_per_s)
            else:
                each += count
        per_byte = 1 / rates.bytes_per_s
        return Cost(flops / rates.flops_per_s, moved * per_byte, each * per_byte, launch)

    def seconds(self, chunks: int) -> float:
        return chunks * self.launch + max(self.arithmetic, self.moved + chunks * self.each)
