"""What the runner asks of a device: three lanes, memory, and how tensors get from side to side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from wf_backends.hetegen.lane_thread import LaneThread, Run
from wf_backends.hetegen.law import Rates

Event = Any  # the end of a lane's work; only the device that made it looks inside
Moment = Any  # of the caller's time
Write = Callable[[Tensor], object]  # fills a tensor


@runtime_checkable
class Device(Protocol):
    """An accelerator, the link to it and the host: a lane each.

    `copy`, `on_host` and `compute` return at once; what their work raises, `wait` raises.
    """

    @property
    def lanes(self) -> Mapping[str, LaneThread]:
        """Those of `jobs.LANE_NAMES` that are threads."""
        ...

    def rates(self) -> Rates:
        """Of its lanes, for one token."""
        ...

    def pinned(self, nbytes: int) -> Tensor:
        """Pinned host memory, (nbytes,) uint8; MemoryError if there is none left."""
        ...

    def place(self, tensor: Tensor) -> Tensor:
        """A copy in the accelerator's memory."""
        ...

    def copy(
        self, rows: Tensor, pinned: Tensor | None, slab: Tensor, after: Sequence[Event]
    ) -> Event:
        """On the link: rows of a weight into a slab, through pinned memory if it is given."""
        ...

    def compute(self, run: Run, nbytes: int, after: Sequence[Event]) -> Event:
        """On the accelerator: run()."""
        ...

    def to_host(self, x: Tensor) -> tuple[Tensor, Sequence[Event]]:
        """(x in host memory, what comes before it may be read)."""
        ...

    def on_host(self, write: Write, out: Tensor, nbytes: int, after: Sequence[Event]) -> Event:
        """On the host: `write` fills memory, which goes to `out` on the accelerator."""
        ...

    def wait(self, events: Sequence[Event]) -> Moment:
        """What the caller does next comes after these events; when they were due."""
        ...

    def now(self) -> Moment:
        """After what the caller has done so far."""
        ...

    def seconds(self, start: Moment, end: Moment) -> float:
        """Between two moments; waits for them."""
        ...

    def stop(self) -> None:
        """End the lanes' threads, and whatever waits. The next work starts them again."""
        ...

    def close(self) -> None:
        """Stop, and give all memory back."""
        ...
