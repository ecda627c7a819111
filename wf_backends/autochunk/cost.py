"""The predicted time of operators in slices: a roofline model with measured rates."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import fx, nn

from wf_backends.autochunk.graph import nbytes
from wf_backends.autochunk.slicing import SlicedOperator, sources

_aten = torch.ops.aten
_BATCHED = (_aten.bmm.default, _aten.baddbmm.default, _aten.matmul.default, _aten.einsum.default)

_MAX_RUNS = 10  # the fastest one counts
_MAX_SECONDS = 0.05  # after which no further run is timed: 16-bit products are slow on some CPUs
_REFERENCE_ROWS = 2048  # of a square float32 matrix, which is packed at `packed_bytes_per_s`
_FEW_ROWS = 16  # that are multiplied with a matrix larger than all caches
_RUNS_PER_TIMING = 10  # on a GPU, where waiting takes most of the time of a single run
_CHANNELS, _WIDTH = 128, 64  # of the row that is convolved, without its halo


@dataclass(frozen=True)
class Rates:
    """What a device does; the defaults are those of one large GPU."""

    launch_seconds: float = 5e-6  # to launch an operator
    flops_per_s: float = 2e14
    bytes_per_s: float = 2e12  # read or written
    packed_bytes_per_s: float = 2e12  # of a large matrix that few rows are multiplied with
    interleaved_bytes_per_s: float = 5e11  # of matrices whose innermost dimension is the batch
    slice_seconds: float = 0.0  # of a loop iteration without its operators
    halo_seconds: float = 0.0  # of few rows of a 3 x 3 convolution of 128 channels, without flops

    def packing_seconds(self, num_bytes: float) -> float:
        """The time to pack a matrix, as libraries do before a product. Smaller matrices are packed
        faster, by the root of their size (torch on a CPU, 256 KiB to 16 MiB)."""
        share = num_bytes / (4 * _REFERENCE_ROWS**2)
        return num_bytes * min(1.0, share**0.5) / self.packed_bytes_per_s

    def convolution_seconds(self, num_bytes: int) -> float:
        """The time beyond arithmetic of a convolution with a halo, in each slice: it grows with the
        root of the weight's bytes (torch on a CPU, 144 KiB to 7 MiB)."""
        return self.halo_seconds * (num_bytes / (4 * 9 * _CHANNELS**2)) ** 0.5


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measures the rates of a device, in about 250 ms (16 bits on some CPUs: 2 s).

    On a CPU, operators that every slice repeats are timed after other data has passed through the
    caches, as between two operators of a slice: a launch then takes at least twice as long. On a
    GPU a launch and a loop iteration cost the host's time, as in models that it is not ahead of. On
    fake and meta devices the result is the defaults, those of one GPU.
    """
    on_cpu = device.type == "cpu"
    if not on_cpu and not torch.accelerator.is_available():
        return Rates()
    zeros = partial(torch.zeros, dtype=dtype, device=device)
    seconds = partial(_seconds, device)
    # `wide` is larger than all caches; `interleaved` are matrices whose batch is innermost.
    square, wide = (zeros(rows, rows) for rows in ((256, 2048) if on_cpu else (4096, 6144)))
    small, interleaved = zeros(1), zeros(128, 128, 32) if on_cpu else zeros(512, 512, 128)
    image, weight = zeros(1, _CHANNELS, 3, _WIDTH + 2), zeros(_CHANNELS, _CHANNELS, 3, 3)
    flush_caches = partial(torch.add, wide[:256], 1)
    launch = seconds(lambda: small + small, flush_caches)
    iteration = seconds(partial(_iterate, nn.Identity(), small), flush_caches)
    flops_per_s = 2 * len(square) ** 3 / seconds(lambda: square @ square)
    bytes_per_s = 2 * wide.nbytes / seconds(lambda: wide + 1)
    packing = seconds(lambda: wide[:_FEW_ROWS] @ wide)
    packing -= 2 * _FEW_ROWS * wide.numel() / flops_per_s
    copying = seconds(lambda: torch.einsum("ikc,jkc->ijc", interleaved[:1], interleaved))
    halo = seconds(lambda: torch.conv2d(image, weight), flush_caches)
    halo -= 2 * _WIDTH * weight.numel() / flops_per_s + weight.nbytes / bytes_per_s
    return Rates(
        launch_seconds=launch,
        flops_per_s=flops_per_s,
        bytes_per_s=bytes_per_s,
        packed_bytes_per_s=wide.nbytes / max(packing, launch),
        interleaved_bytes_per_s=interleaved.nbytes / copying,
        slice_seconds=iteration,
        halo_seconds=max(halo, 0.0),
    )


def _iterate(body: nn.Module, value: torch.Tensor) -> None:
    """A loop iteration over slices with three inputs and one output, without operators."""
    slices = [value.narrow(0, 0, 1) for _ in range(3)]
    value.narrow(0, 0, 1).copy_(body(slices[0]))


def _seconds(
    device: torch.device, run: Callable[[], object], before: Callable[[], object] | None = None
) -> float:
    """The time of the fastest run. On a CPU this is the thread's time, so that other processes do
    not count, and `before` runs before each timing; a GPU's runs are timed several at once."""
    on_cpu = device.type == "cpu"
    clock, num_runs = (time.thread_time, 1) if on_cpu else (time.perf_counter, _RUNS_PER_TIMING)
    synchronize = (lambda: None) if on_cpu else partial(torch.accelerator.synchronize, device)
    timings: list[float] = []
    run()
    while len(timings) < _MAX_RUNS and sum(timings) < _MAX_SECONDS:
        if on_cpu and before is not None:
            before()
        synchronize()
        start = clock()
        for _ in range(num_runs):
            run()
        synchronize()
        timings.append(clock() - start)
    return min(timings) / num_runs


@dataclass(frozen=True)
class OperatorCost:
    """The time of an operator in slices, in seconds:

    num_slices * per_slice + max(arithmetic, sliced_traffic + num_slices * whole_traffic)
    """

    arithmetic: float  # of all slices together
    sliced_traffic: float  # reading and writing the tensors that are sliced, once
    whole_traffic: float  # reading the tensors that each slice needs whole
    per_slice: float  # launching, packing and copying

    @staticmethod
    def estimate(op: SlicedOperator, flops: int, rates: Rates) -> OperatorCost:
        """Each slice of a product packs, or copies, the tensor that it needs whole; each slice of a
        convolution with a halo takes longer."""
        sliced_bytes, whole_bytes, per_slice = nbytes(op.node), 0, rates.launch_seconds
        for source in op.sources:
            num_bytes = nbytes(source.node)
            if source.dim is not None:
                sliced_bytes += num_bytes
            elif is_interleaved(op.node, source.node):
                per_slice += num_bytes / rates.interleaved_bytes_per_s
            elif flops:
                per_slice += max(rates.packing_seconds(num_bytes), num_bytes / rates.bytes_per_s)
            else:
                whole_bytes += num_bytes
        if flops and any(source.before or source.after for source in op.sources):
            weights = (nbytes(source.node) for source in op.sources if source.dim is None)
            per_slice += rates.convolution_seconds(max(weights))
        per_byte = 1 / rates.bytes_per_s
        traffic = sliced_bytes * per_byte, whole_bytes * per_byte
        return OperatorCost(flops / rates.flops_per_s, *traffic, per_slice)

    def seconds(self, num_slices: int) -> float:
        traffic = self.sliced_traffic + num_slices * self.whole_traffic
        return num_slices * self.per_slice + max(self.arithmetic, traffic)


def is_interleaved(product: fx.Node, operand: fx.Node) -> bool:
    """Whether elements adjacent in the operand's memory belong to different matrices of a batch,
    so that a slice along the innermost dimension takes other matrices of all operands.

    Libraries copy such matrices one by one before they multiply them.
    """
    if product.target not in _BATCHED:
        return False
    strides = operand.meta["val"].stride()
    innermost = strides.index(min(strides)) if strides else None
    reads = [sources(product, dim) or () for dim in range(product.meta["val"].ndim)]
    of_batch = [read for read in reads if all(source.dim is not None for source in read)]
    return any(source.value == (operand, innermost) for read in of_batch for source in read)
