"""The rates of this machine: the link, the host, the accelerator, staging, the host's memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from wf_backends.hetegen.law import Rates

if TYPE_CHECKING:
    from wf_backends.hetegen.accelerator import Streams

WEIGHTS = 4  # so many that caches do not hold them all
MANY_TOKENS = 256
CALL_SECONDS = 1e-4  # of a join of host and accelerator


def measure_rates(
    streams: Streams | None,
    dtype: torch.dtype = torch.float32,
    width: int = 4096,
    seconds: float = 0.7,
) -> Rates:
    """Time copies and GEMMs over one token and over many, each for about so many seconds.

    Without an accelerator (streams None) a thread stands for it: its link is a copy within host
    memory, and its GEMM is the host's.
    """
    weights = [torch.randn(width, width).to(dtype) for _ in range(WEIGHTS)]
    there, wait = _other_side(weights[0], streams)
    pinned = _pinned_like(weights[0], streams)
    one, many = (torch.randn(tokens, width).to(dtype) for tokens in (1, MANY_TOKENS))
    operations = 2.0 * MANY_TOKENS * width * width
    nbytes = weights[0].nbytes

    def link(i: int) -> None:
        there[i % len(there)].copy_(weights[i] if streams is None else pinned, non_blocking=True)

    def timed(run: Callable[[int], object]) -> float:
        return _seconds_each(run, wait, seconds)

    def gemm(x: Tensor, rows: list[Tensor]) -> Callable[[int], object]:
        x = x.to(rows[0].device)
        return lambda i: F.linear(x, rows[i % len(rows)])

    host = nbytes / timed(gemm(one, weights))
    link_rate = nbytes / timed(link)
    device = there if streams is not None else weights
    return Rates(
        link=link_rate,
        host=host,
        accelerator=nbytes / timed(gemm(one, device)),
        memory=_together(gemm(one, weights), link, wait, nbytes, seconds),
        staging=nbytes / timed(lambda i: pinned.copy_(weights[i])),
        host_flops=operations / timed(gemm(many, weights)),
        accelerator_flops=operations / timed(gemm(many, device)),
        call_seconds=CALL_SECONDS,
    )


def measure_machine() -> tuple[str, Rates]:
    """(the accelerator that torch finds, or "threads" where there is none; its rates)."""
    from wf_backends.hetegen.accelerator import TorchStreams

    if not torch.accelerator.is_available():
        return "threads", measure_rates(None)
    streams = TorchStreams()
    return str(streams.device), measure_rates(streams)


def _other_side(weight: Tensor, streams: Streams | None) -> tuple[list[Tensor], Callable]:
    """Weights in the accelerator's memory, and what waits for it."""
    if streams is None:
        return [torch.empty_like(weight)], lambda: None
    there = [torch.randn_like(weight, device=streams.device) for _ in range(WEIGHTS)]
    return there, streams.synchronize


def _pinned_like(weight: Tensor, streams: Streams | None) -> Tensor:
    if streams is None:
        return torch.empty_like(weight)
    return streams.pinned(*weight.shape, dtype=weight.dtype)


def _seconds_each(run: Callable[[int], object], wait: Callable[[], None], seconds: float) -> float:
    """The median over the turns through the weights, of one run."""
    took, end = [], time.perf_counter() + seconds
    with torch.inference_mode():
        run(0)
        wait()
        while not took or time.perf_counter() < end:
            start = time.perf_counter()
            for i in range(WEIGHTS):
                run(i)
            wait()
            took.append((time.perf_counter() - start) / WEIGHTS)
    return median(took)


def _together(
    host: Callable[[int], object],
    link: Callable[[int], object],
    wait: Callable[[], None],
    nbytes: int,
    seconds: float,
) -> float:
    """Bytes a second that the host's GEMM and the link take of host memory at a time."""
    rates: list[float] = []

    def measure(run: Callable[[int], object], wait: Callable[[], None]) -> None:
        rates.append(nbytes / _seconds_each(run, wait, seconds))

    other = threading.Thread(target=measure, args=(link, wait))
    other.start()
    measure(host, lambda: None)
    other.join()
    return sum(rates)
