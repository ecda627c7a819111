"""A device without an accelerator: real tensors, and threads as lanes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from math import inf

import torch
from torch import Tensor

from wf_backends.hetegen.device import Steps, Work
from wf_backends.hetegen.jobs import LANES
from wf_backends.hetegen.lane_thread import LaneThread, Stop, end_lanes
from wf_backends.hetegen.law import Rates

THREAD_CALL_SECONDS = 2e-4  # to hand work to a thread and wait for it, on a core that is shared


class ShapedDevice:
    """Lanes whose work takes no less than its bytes, or its operations, take at a given rate.

    Everything is in host memory. What an accelerator would hold is counted, and what is pinned.

    Args:
        link_bytes_per_s, host_bytes_per_s, accelerator_bytes_per_s: weight bytes a second.
        host_flops, accelerator_flops: operations a second, which bound work on many tokens.
        pinned_limit_bytes: how much memory can be pinned.
        call_seconds: from the end of one call of a split linear to the next, for predictions.

    Attributes:
        bytes, peak_bytes: of the accelerator's memory: now, and at most.
        pinned_bytes: of pinned memory.
    """

    def __init__(
        self,
        link_bytes_per_s: float,
        host_bytes_per_s: float,
        accelerator_bytes_per_s: float,
        *,
        host_flops: float = inf,
        accelerator_flops: float = inf,
        pinned_limit_bytes: float = inf,
        call_seconds: float = THREAD_CALL_SECONDS,
    ) -> None:
        self._rates = Rates(
            link_bytes_per_s,
            host_bytes_per_s,
            accelerator_bytes_per_s,
            host_flops=host_flops,
            accelerator_flops=accelerator_flops,
            call_seconds=call_seconds,
        )
        self._pinned_limit = pinned_limit_bytes
        self.bytes = self.peak_bytes = self.pinned_bytes = 0
        self._stop = Stop()
        self.lanes = {
            name: LaneThread(name, self._stop, partial(self._seconds, name)) for name in LANES
        }

    def _seconds(self, lane: str, work: Work) -> float:
        """What a work of a lane takes at least."""
        rates = self._rates
        if lane == "link":
            return work.nbytes / (rates if self.pinned_bytes else rates.unpinned()).link
        flops = rates.host_flops if lane == "host" else rates.accelerator_flops
        return max(work.nbytes / getattr(rates, lane), work.operations / flops)

    def rates(self) -> Rates:
        return self._rates

    def pinned(self, nbytes: int) -> Tensor:
        if self.pinned_bytes + nbytes > self._pinned_limit:
            raise MemoryError(f"{nbytes} bytes beyond {self.pinned_bytes} cannot be pinned")
        self.pinned_bytes += nbytes
        return torch.empty(nbytes, dtype=torch.uint8)

    def place(self, tensor: Tensor) -> Tensor:
        self.bytes += tensor.nbytes
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    def copy(self, source: Tensor, pinned: Tensor | None, slab: Tensor) -> Steps:
        return lambda: slab.copy_(source if pinned is None else pinned.copy_(source)), None

    def to_host(self, x: Tensor) -> tuple[Tensor, Sequence[Future[float]]]:
        return x, ()

    def from_host(self, write: Callable[[Tensor], object], out: Tensor) -> Steps:
        return partial(write, out), None

    def wait(self, events: Sequence[Future[float]]) -> float:
        return max(event.result() for event in events)

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def stop(self) -> None:
        end_lanes(self.lanes.values(), self._stop)

    def close(self) -> None:
        self.stop()
        self.bytes = self.pinned_bytes = 0
