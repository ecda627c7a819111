"""What the runner asks of a device: three lanes, memory, and how tensors get from side to side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from wf_backends.hetegen.law import Rates

Event = Any  # what `submit` returns; only the device that made it looks inside
Moment = Any  # of the caller's time
Steps = tuple[Callable[[], object], tuple[Tensor, Tensor] | None]  # of a Work: `run`, `staged`


@dataclass(frozen=True, slots=True)
class Work:
    """Something for a lane to do.

    Attributes:
        run: does it.
        nbytes: of weights that it copies or reads.
        operations: of its GEMM, 0 for a copy.
        staged: (pinned memory that `run` fills, what it is copied to then); None: `run` does all.
    """

    run: Callable[[], object]
    nbytes: int
    operations: float = 0.0
    staged: tuple[Tensor, Tensor] | None = None


class Lane(Protocol):
    """Does one work after the other, in the order of `submit`, like a stream.

    Attributes:
        busy_seconds, nbytes: of everything done so far.
    """

    busy_seconds: float
    nbytes: int

    def submit(self, work: Work, after: Sequence[Event] = ()) -> Event:
        """Do it after these events, and return at once. What it raises, `Device.wait` raises."""
        ...


class Device(Protocol):
    """An accelerator, the link to it and the host."""

    @property
    def lanes(self) -> Mapping[str, Lane]: ...  # those of `jobs.LANES`

    def rates(self) -> Rates:
        """Of its lanes, for one token."""
        ...

    def pinned(self, nbytes: int) -> Tensor:
        """Pinned host memory, (nbytes,) uint8; MemoryError if there is none left."""
        ...

    def place(self, tensor: Tensor) -> Tensor:
        """A copy in the accelerator's memory."""
        ...

    def copy(self, source: Tensor, pinned: Tensor | None, slab: Tensor) -> Steps:
        """For the link's lane: rows of a weight into a slab, all three of one shape."""
        ...

    def to_host(self, x: Tensor) -> tuple[Tensor, Sequence[Event]]:
        """(x in host memory, what comes before it may be read)."""
        ...

    def from_host(self, write: Callable[[Tensor], object], out: Tensor) -> Steps:
        """For the host's lane: `write` fills `out`, part of an accelerator's tensor."""
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
        """End the lanes' threads, and whatever waits. The next `submit` starts them again."""
        ...

    def close(self) -> None:
        """Stop, and give all memory back."""
        ...
