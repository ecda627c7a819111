"""Measures the rates of this machine: link, staging, host, accelerator, and the host's memory.

What the threads of lanes do is measured in split linears, as it is used: with pauses between calls,
after which a CPU's threads wake up, and with waiting for other threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import isqrt
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wf_backends.hetegen.accelerator import Accelerator, Streams
from wf_backends.hetegen.device import ShapedDevice
from wf_backends.hetegen.dispatch import dispatch_model
from wf_backends.hetegen.runner import Device
from wf_backends.hetegen.weights import Rates, best_alpha

WEIGHT_BYTES = 2**27  # a weight of the models that are too large for an accelerator
WIDTH_STEP = 256  # widths of models are multiples of it
NUM_WEIGHTS = 6  # more than caches hold
PINNED_BUFFERS = 3  # as many as a plan has slabs by default
MANY_TOKENS = 256  # in a GEMM that operations bound, not memory
NUM_LINEARS = 200  # of the model whose calls are timed
FAST = 1e13  # bytes per second: work takes no time
MAX_ALPHA = 0.8  # where both lanes work: an eighth is resident at most, and the rest streamed
MIN_ALPHA = 1 / 256  # the host computes some rows, however slow it is
MIN_SHARE = 0.1  # of a pass, that the host's GEMM takes at least: the rest is a difference
Run = Callable[[int], object]  # called with the number of a weight


def measure_machine(dtype: torch.dtype, pin_weights: bool = False) -> tuple[str, Rates]:
    """(the accelerator that torch finds, or "threads" if it finds none; the rates).

    Args:
        dtype: of the weights.
        pin_weights: whether the weights are pinned; else copies pass through pinned memory.
    """
    if not torch.accelerator.is_available():
        return "threads", measure_rates(None, dtype, pin_weights)
    streams = Streams()
    return str(streams.device), measure_rates(streams, dtype, pin_weights)


def measure_rates(
    streams: Streams | None,
    dtype: torch.dtype,
    pin_weights: bool = False,
    width: int | None = None,
    seconds: float = 0.7,
) -> Rates:
    """The rates of copies and GEMMs, each measured for `seconds`.

    Args:
        streams: None: without an accelerator. Copies within host memory stand for its link, and the
            host's GEMM for its own.
        dtype: of the weights. The host's GEMM has other rates in 16 bits than in 32.
        pin_weights: as in `measure_machine`.
        width: input and output features of a weight; None: those of WEIGHT_BYTES.
    """
    width = width or isqrt(WEIGHT_BYTES // dtype.itemsize) // WIDTH_STEP * WIDTH_STEP
    weights = [
        torch.full((width, width), 1 / width, dtype=dtype, device="cpu") for _ in range(NUM_WEIGHTS)
    ]
    device_weights = [weight.to(streams.device) for weight in weights] if streams else weights
    clock = streams.clock if streams else time.perf_counter

    def rate(run: Run, nbytes: int = weights[0].nbytes) -> float:
        return nbytes / _seconds_per_run(run, NUM_WEIGHTS, clock, seconds)

    def flops(weights: list[Tensor]) -> float:
        parts = [weight[: width // 4] for weight in weights]  # a whole one takes a CPU a second
        flops_per_byte = 2.0 * MANY_TOKENS / parts[0].itemsize
        return flops_per_byte * rate(_gemm(MANY_TOKENS, parts), parts[0].nbytes)

    link = rate(_copy(streams, weights, torch.empty_like(device_weights[0])))
    call_seconds, host_call_seconds = measure_call(_device(streams, FAST, 0.0))
    lanes = weights, _device(streams, link, call_seconds), clock, seconds, pin_weights
    split_rates = partial(_rates_of_split_linears, *lanes, host_call_seconds)
    return Rates(
        link=link,
        accelerator=rate(_gemm(1, device_weights)),
        host_flops=flops(weights),
        accelerator_flops=flops(device_weights),
        call_seconds=call_seconds,
        host_call_seconds=host_call_seconds,
        **_rates_of_lanes(split_rates, link, call_seconds + host_call_seconds, weights[0].nbytes),
    )


def _device(streams: Streams | None, link: float, call_seconds: float) -> Device:
    """A device whose plans are made for these rates."""
    rates = Rates(link, FAST, FAST, call_seconds=call_seconds)
    return Accelerator(rates, streams) if streams else ShapedDevice(FAST, FAST, FAST)


def _gemm(tokens: int, weights: list[Tensor]) -> Run:
    x = torch.randn(tokens, weights[0].shape[1], device="cpu").to(weights[0])
    return lambda i: F.linear(x, weights[i])


def _copy(streams: Streams | None, weights: list[Tensor], slab: Tensor) -> Run:
    """Copies to the slab, from pinned memory if there is an accelerator."""
    shape, dtype = weights[0].shape, weights[0].dtype
    pinned = [streams.pinned(shape, dtype) for _ in range(PINNED_BUFFERS)] if streams else weights
    return lambda i: slab.copy_(pinned[i % len(pinned)], non_blocking=True)


def _rates_of_lanes(
    split_rates: Callable[[float], tuple[float, float]], link: float, call: float, nbytes: int
) -> dict[str, float]:
    """The rates of the lanes that are threads: each alone, and both with work for equal times.

    Args:
        split_rates: by the host's share, `_rates_of_split_linears` of `nbytes` each.
        call: seconds for which only the link works, with each linear.
    """
    staging, host = split_rates(0.0)[0], split_rates(1.0)[1]
    streamed_beside_host, host_beside_link = staging, host
    for _ in range(2):  # first with the work that takes equal times if none disturbs the other
        both = Rates(streamed_beside_host, host_beside_link, FAST, host_call_seconds=call)
        alpha = best_alpha(0.0, both, nbytes) or host / (host + staging)
        streamed_beside_host, host_beside_link = split_rates(min(max(alpha, MIN_ALPHA), MAX_ALPHA))
    return {
        "staging": staging,
        "host": host,
        "host_beside_link": min(host, host_beside_link),
        "memory": max(streamed_beside_host + host_beside_link, min(link, staging)),
    }


def _rates_of_split_linears(
    weights: list[Tensor],
    device: Device,
    clock: Callable[[], float],
    seconds: float,
    pin_weights: bool,
    host_call_seconds: float,
    alpha: float,
) -> tuple[float, float]:
    """Bytes per second of split linears with these weights: (streamed, computed by the host).

    The host computes the share `alpha` of each. Copies go on between calls.
    """
    linears = [nn.Linear(*weight.shape, bias=False, device="meta") for weight in weights]
    for linear, weight in zip(linears, weights, strict=True):
        linear.weight = nn.Parameter(weight, requires_grad=False)
    model, memory = nn.Sequential(*linears), PINNED_BUFFERS * weights[0].nbytes // 4
    x = device.place(torch.ones(1, weights[0].shape[1], dtype=weights[0].dtype, device="cpu"))
    pin_memory = "weights" if pin_weights else True
    with dispatch_model(model, {0: memory}, device, alpha=alpha, pin_memory=pin_memory) as handle:
        pass_seconds = _seconds_per_run(lambda _: model(x), 1, clock, seconds)
        figures, splits = handle.report()["decode"], handle.plan.splits
    between = (len(weights) - 1) * figures["call_seconds"] + len(weights) * host_call_seconds
    in_calls = figures["measured_seconds"] - between
    streamed = sum(split.streamed("decode") * split.linear.row_bytes for split in splits)
    by_host = sum(split.alpha("decode") * split.linear.nbytes for split in splits)
    return streamed / pass_seconds, by_host / max(in_calls, MIN_SHARE * pass_seconds)


def measure_call(device: Device) -> tuple[float, float]:
    """(`call_seconds`, `host_call_seconds`) of `Rates`: of linears so small that all is waiting."""
    linears = [nn.Linear(32, 32, bias=False, device="cpu") for _ in range(NUM_LINEARS)]
    model, memory = nn.Sequential(*linears), NUM_LINEARS * linears[0].weight.nbytes // 2
    x = device.place(torch.ones(1, 32, device="cpu"))
    with dispatch_model(model, {0: memory}, device, alpha=0.5) as handle, torch.inference_mode():
        for _ in range(5):
            model(x)
        figures = handle.report()["decode"]
    between = figures["call_seconds"]
    in_calls = figures["measured_seconds"] - (NUM_LINEARS - 1) * between
    return between, max(0.0, in_calls / NUM_LINEARS)


def _seconds_per_run(
    run: Run, num_weights: int, clock: Callable[[], float], seconds: float
) -> float:
    """Seconds of one run: run(0) to run(num_weights - 1) are timed together; median of repeats."""
    with torch.inference_mode():
        run(0)
        times = [clock()]
        while len(times) == 1 or times[-1] < times[0] + seconds:
            for i in range(num_weights):
                run(i)
            times.append(clock())
    return median((end - start) / num_weights for start, end in pairwise(times))
