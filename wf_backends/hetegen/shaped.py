"""A device without an accelerator: real tensors, and threads as lanes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wf_backends.hetegen.lane_thread import Lanes, Run, Write
from wf_backends.hetegen.law import Rates
from wf_backends.hetegen.plan import LANE_NAMES

THREAD_CALL_SECONDS = 2e-4  # to hand work to a thread and wait for it, on a core that is shared
End = Future[float]


class ShapedDevice(Lanes):
    """Lanes whose work takes no less than its bytes take at a given rate.

    Everything is in host memory. What an accelerator would hold is counted, and what is pinned.

    Args:
        link_bytes_per_s, host_bytes_per_s, accelerator_bytes_per_s: weight bytes a second.
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
        call_seconds: float = THREAD_CALL_SECONDS,
    ) -> None:
        super().__init__(*LANE_NAMES)
        rates = link_bytes_per_s, host_bytes_per_s, accelerator_bytes_per_s
        self._rates = Rates(*rates, call_seconds=call_seconds)
        self.bytes = self.peak_bytes = self.pinned_bytes = 0

    def rates(self, dtype: torch.dtype) -> Rates:
        return self._rates

    def _submit(self, lane: str, run: Run, nbytes: int, after: End | None = None) -> End:
        due = None if after is None else after.result
        return self.lanes[lane].submit(run, self._seconds(lane, nbytes), due)

    def _seconds(self, lane: str, nbytes: int) -> float:
        """What a work of a lane takes at least."""
        rates = self._rates if self.pinned_bytes else self._rates.unpinned()
        return nbytes / getattr(rates, lane)

    def pinned(self, nbytes: int) -> Tensor:
        self.pinned_bytes += nbytes
        return torch.empty(nbytes, dtype=torch.uint8)

    def place(self, tensor: Tensor) -> Tensor:
        self.bytes += tensor.nbytes
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    def copy(self, rows: Tensor, pinned: Tensor | None, slab: Tensor, after: End | None) -> End:
        def run() -> None:
            slab.copy_(rows if pinned is None else pinned.copy_(rows))

        return self._submit("link", run, rows.nbytes, after)

    def compute(self, run: Run, nbytes: int, after: End | None) -> End:
        return self._submit("accelerator", run, nbytes, after)

    def on_host(self, write: Write, x: Tensor, out: Tensor, nbytes: int) -> End:
        return self._submit("host", partial(write, x, out), nbytes)

    def wait(self, events: Sequence[Any]) -> float:
        return max(event.result() for event in events)

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def close(self) -> None:
        super().close()
        self.bytes = self.pinned_bytes = 0
