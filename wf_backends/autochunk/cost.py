"""The time of operators, whole and in slices, by a roofline with measured rates."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from wf_backends.graph import nbytes
from wf_backends.slicing import SlicedOperator, is_interleaved

_RUNS = 10  # of which the least time counts
_ENOUGH = 0.05  # seconds after which no further run is timed: 16-bit products on some CPUs
_KNOWN_WIDE = 2048  # rows of the float32 matrix for which a packing rate is the rate
_FEW = 16  # rows that are multiplied with a matrix that no cache holds
_AT_ONCE = 10  # runs on a GPU that are timed together: one call's time is mostly that of waiting
_CHANNELS, _WIDTH = 128, 64  # of a row that is convolved, with the rows and places around it


@dataclass(frozen=True)
class _Sizes:
    """What is timed to find the rates."""

    square: int  # rows of the matrices that are multiplied to find the rate of arithmetic
    wide: int  # rows of a matrix that no cache holds
    rows: int  # of the products that are summed over neither's innermost dimension
    batch: int  # so many of them


_ON_CPU = _Sizes(square=256, wide=2048, rows=128, batch=32)
_ON_GPU = _Sizes(square=4096, wide=6144, rows=512, batch=128)


@dataclass(frozen=True)
class Rates:
    """What a device does; the defaults are those of one large GPU."""

    launch_seconds: float = 5e-6  # of an operator
    flops_per_s: float = 2e14
    bytes_per_s: float = 2e12  # that are read or written
    packed_bytes_per_s: float = 2e12  # of a large matrix with which few rows are multiplied
    interleaved_bytes_per_s: float = (
        5e11  # of matrices of which the innermost dimension is the batch
    )
    slice_seconds: float = (
        0.0  # of a turn of the loop beside its operators; a GPU's host runs ahead
    )
    halo_seconds: float = (
        0.0  # of few rows of a 3 x 3 convolution of 128 channels, beside its flops
    )

    def packing_seconds(self, count: float) -> float:
        """The time that a slice of few rows takes for a matrix of `count` bytes that it is
        multiplied with: libraries pack it first. What caches hold is packed faster, by the root of
        its size (torch on a CPU, 256 KiB to 16 MiB)."""
        share = count / (4 * _KNOWN_WIDE**2)
        return count * min(1.0, share**0.5) / self.packed_bytes_per_s

    def convolution_seconds(self, count: int) -> float:
        """The time that a slice's convolution with a halo takes beside its arithmetic, with a
        weight of `count` bytes: it grows by the root of them (torch on a CPU, 144 KiB to 7 MiB)."""
        return self.halo_seconds * (count / (4 * 9 * _CHANNELS**2)) ** 0.5


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """The rates of this device, in about 250 ms (16 bits on some CPUs: 2 s). Fake and meta devices
    get those of one GPU.

    On a CPU, what every slice repeats is timed after other data has passed through the caches, as
    between two operators of a slice: a launch takes twice as long then, or more. The host runs
    ahead of a GPU, so there a turn of the loop costs nothing, and a launch the host's time.
    """
    on_cpu = device.type == "cpu"
    if not on_cpu and not torch.accelerator.is_available():
        return Rates()
    of = _ON_CPU if on_cpu else _ON_GPU
    zeros, timed = partial(torch.zeros, dtype=dtype, device=device), partial(_seconds, device)
    small, square, wide = zeros(1), zeros(of.square, of.square), zeros(of.wide, of.wide)
    mixed = zeros(of.rows, of.rows, of.batch)
    image, weight = zeros(1, _CHANNELS, 3, _WIDTH + 2), zeros(_CHANNELS, _CHANNELS, 3, 3)
    passing = partial(torch.add, wide[:256], 1)
    launch = timed(lambda: small + small, passing)
    turn = timed(partial(_turn, nn.Identity(), small), passing) if on_cpu else 0.0
    flops = 2 * of.square**3 / timed(lambda: square @ square)
    few = timed(lambda: wide[:_FEW] @ wide) - 2 * _FEW * of.wide**2 / flops
    row = timed(lambda: torch.einsum("ikc,jkc->ijc", mixed[:1], mixed))
    moved = 2 * wide.nbytes / timed(lambda: wide + 1)
    halo = timed(lambda: torch.conv2d(image, weight), passing)
    halo -= 2 * _WIDTH * weight.numel() / flops + weight.nbytes / moved
    packed = wide.nbytes / max(few, launch)
    return Rates(launch, flops, moved, packed, mixed.nbytes / row, turn, max(halo, 0.0))


def _turn(body: nn.Module, value: torch.Tensor) -> None:
    """What the loop over slices does beside its operators, for three inputs and one output."""
    given = [value.narrow(0, 0, 1) for _ in range(3)]
    value.narrow(0, 0, 1).copy_(body(given[0]))


def _seconds(
    device: torch.device, run: Callable[[], object], before: Callable[[], object] | None = None
) -> float:
    """The least of a few runs. On a CPU it is the time of this thread, so that other processes do
    not count, each after one of `before`; elsewhere several runs are timed together."""
    on_cpu, took = device.type == "cpu", list[float]()
    clock, count = (time.thread_time, 1) if on_cpu else (time.perf_counter, _AT_ONCE)
    wait = (lambda: None) if on_cpu else partial(torch.accelerator.synchronize, device)
    run()
    while len(took) < _RUNS and sum(took) < _ENOUGH:
        if on_cpu and before is not None:
            before()
        wait()
        start = clock()
        for _ in range(count):
            run()
        wait()
        took.append(clock() - start)
    return min(took) / count


@dataclass(frozen=True)
class Cost:
    """The seconds of an operator in slices: of its arithmetic, of moving what is sliced, of moving
    for every slice what is not, and of launching each slice."""

    arithmetic: float
    moved: float
    each: float
    launch: float

    @staticmethod
    def of(op: SlicedOperator, flops: int, rates: Rates) -> Cost:
        """What a product reads whole is packed, or copied, for every slice. A convolution that
        reads a halo takes longer for each slice."""
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
        if flops and any(source.before or source.after for source in op.sources):
            whole = (nbytes(source.node) for source in op.sources if source.dim is None)
            launch += rates.convolution_seconds(max(whole))
        per_byte = 1 / rates.bytes_per_s
        return Cost(flops / rates.flops_per_s, moved * per_byte, each * per_byte, launch)

    def seconds(self, chunks: int) -> float:
        return chunks * self.launch + max(self.arithmetic, self.moved + chunks * self.each)
