"""The rates of this machine: the link, the host, the accelerator, staging, the host's memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wf_backends.hetegen.accelerator import Accelerator, Streams
from wf_backends.hetegen.device import ShapedDevice
from wf_backends.hetegen.dispatch import dispatch_model
from wf_backends.hetegen.runner import Device
from wf_backends.weights import Rates

WEIGHTS_BYTES = 2**28  # so many that caches do not hold them all
SLABS = 3  # that a plan has, as a rule
MANY_TOKENS = 256
CALLS = 200  # of linears that take no time
FAST = 1e13  # bytes a second: no time


def measure_machine(dtype: torch.dtype) -> tuple[str, Rates]:
    """(the accelerator that torch finds, or "threads" where there is none; its rates)."""
    if not torch.accelerator.is_available():
        return "threads", measure_rates(None, dtype)
    streams = Streams()
    return str(streams.device), measure_rates(streams, dtype)


def measure_rates(
    streams: Streams | None, dtype: torch.dtype, width: int = 4096, seconds: float = 0.7
) -> Rates:
    """Time copies and GEMMs over one token and over many, each for so many seconds.

    The type is that of the weights: a host's GEMM in 16 bits has another rate than in 32.
    Without an accelerator (streams None) a thread stands for it: its link is a copy within host
    memory, and its GEMM is the host's.
    """
    number = max(2, WEIGHTS_BYTES // (width * width * dtype.itemsize))
    weights = [torch.randn(width, width).to(dtype) for _ in range(number)]
    there, clock = weights, time.perf_counter
    device: Device = ShapedDevice(FAST, FAST, FAST)
    if streams is not None:
        there = [weight.to(streams.device) for weight in weights]
        pinned = [streams.pinned(weights[0].shape, dtype) for _ in range(SLABS)]
        clock = _clock_of(streams)
        device = Accelerator(Rates(FAST, FAST, FAST), streams)
    slab = torch.empty_like(there[0])

    def rate(run: Callable[[int], object], clock: Callable[[], float] = clock) -> float:
        return weights[0].nbytes / _seconds_each(run, number, clock, seconds)

    def gemm(tokens: int, rows: list[Tensor]) -> Callable[[int], object]:
        x = torch.randn(tokens, width).to(rows[0])
        return lambda i: F.linear(x, rows[i])

    def link(i: int) -> None:
        slab.copy_(weights[i] if streams is None else pinned[i % SLABS], non_blocking=True)

    def lane(i: int) -> None:  # as a run has it: the host's memory is read, written and read again
        if streams is not None:
            pinned[i % SLABS].copy_(weights[i])
        link(i)

    with ThreadPoolExecutor(1) as thread:
        beside = thread.submit(rate, gemm(1, weights), time.perf_counter)
        link_beside, host_beside = rate(lane), beside.result()
    alone, staging, host = rate(link), rate(lane), rate(gemm(1, weights))
    flops = 2.0 * MANY_TOKENS / weights[0].itemsize  # for each byte
    return Rates(
        link=alone,
        host=host,
        accelerator=rate(gemm(1, there)),
        memory=max(link_beside + host_beside, min(alone, staging)),
        host_beside_link=min(host, host_beside),
        staging=staging,
        host_flops=flops * rate(gemm(MANY_TOKENS, weights)),
        accelerator_flops=flops * rate(gemm(MANY_TOKENS, there)),
        call_seconds=measure_call(device),
    )


def measure_call(device: Device) -> float:
    """Seconds from the end of one call to the next, with linears whose GEMMs take none."""
    linears = [nn.Linear(32, 32, bias=False) for _ in range(CALLS)]
    model, memory = nn.Sequential(*linears), CALLS * linears[0].weight.nbytes // 2
    x = device.place(torch.ones(1, 32))
    with dispatch_model(model, {0: memory}, device, alpha=0.5) as handle, torch.inference_mode():
        for _ in range(5):
            model(x)
        return handle.report()["decode"]["call_seconds"]


def _clock_of(streams: Streams) -> Callable[[], float]:
    """The time at which all is done that the streams were given."""

    def clock() -> float:
        streams.synchronize()
        return time.perf_counter()

    return clock


def _seconds_each(
    run: Callable[[int], object], number: int, clock: Callable[[], float], seconds: float
) -> float:
    """The median over the turns through the weights, of one run."""
    with torch.inference_mode():
        run(0)
        times = [clock()]
        while len(times) == 1 or times[-1] < times[0] + seconds:
            for i in range(number):
                run(i)
            times.append(clock())
    return median((end - start) / number for start, end in pairwise(times))
