"""A real accelerator, of whatever kind torch finds: streams, events and pinned memory.

The link's lane is a thread that fills pinned memory and puts copies on a stream of its own; the
host's lane is a thread that computes and puts results on another. What the accelerator computes
goes on the caller's stream. No call of a split linear waits for the accelerator: streams wait for
events. A stream can only wait for an event that was recorded, so the caller does wait until a
lane's thread has put its work on its stream.

It has not run on an accelerator yet; tests run it on a stand-in for streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from wf_backends.hetegen.device import Work
from wf_backends.hetegen.lane_thread import LaneThread, ThreadEvent
from wf_backends.hetegen.law import Rates


class Streams(Protocol):
    """What is asked of torch; streams and events are torch's."""

    device: torch.device

    def stream(self) -> Any: ...
    def event(self) -> Any: ...
    def current(self) -> Any: ...
    def use(self, stream: Any) -> None: ...
    def synchronize(self) -> None: ...
    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor: ...


class TorchStreams:
    """Of the accelerator that torch finds.

    Raises:
        ValueError: if there is none.
    """

    def __init__(self) -> None:
        if not torch.accelerator.is_available():
            raise ValueError(
                "torch finds no accelerator here; to try HeteGen without one pass device="
                "ShapedDevice(link_bytes_per_s=..., host_bytes_per_s=..., "
                "accelerator_bytes_per_s=...)"
            )
        self.device = torch.accelerator.current_stream().device

    def stream(self) -> torch.Stream:
        return torch.Stream(self.device)

    def event(self) -> torch.Event:
        return torch.Event(self.device)

    def current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)

    def use(self, stream: torch.Stream) -> None:
        torch.accelerator.set_stream(stream)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)


@dataclass(frozen=True, slots=True)
class Recorded:
    """An event of a stream, and the event of the thread that records it (None: it was)."""

    event: Any
    by: ThreadEvent | None


class StreamLane:
    """A thread that puts work on a stream of its own.

    Args:
        name: of the lane.
        streams: makes the stream and events.
        reads: whether the thread itself reads what the events it comes after stand for.
    """

    def __init__(self, name: str, streams: Streams, reads: bool) -> None:
        self.thread = LaneThread(name)
        self.stream = streams.stream()
        self._streams, self._reads = streams, reads

    @property
    def busy_seconds(self) -> float:
        """Of the thread."""
        return self.thread.busy_seconds

    @property
    def nbytes(self) -> int:
        return self.thread.nbytes

    def submit(self, work: Work, after: Sequence[Recorded] = ()) -> Recorded:
        done = self._streams.event()

        def run() -> None:
            for other in after:
                if self._reads:
                    other.event.synchronize()
                else:
                    self.stream.wait_event(other.event)
            with _on(self._streams, self.stream):
                work.run()
            done.record(self.stream)

        by = [other.by for other in after if other.by is not None]
        return Recorded(done, self.thread.submit(Work(run, work.nbytes, work.operations), by))


class CallerLane:
    """Puts work on the caller's stream, at once. Its time is not measured."""

    def __init__(self, streams: Streams) -> None:
        self.busy_seconds, self.nbytes = 0.0, 0
        self._streams = streams

    def wait(self, events: Sequence[Recorded]) -> Any:
        """The caller's stream, which comes after these events."""
        stream = self._streams.current()
        for other in events:
            if other.by is not None:
                other.by.wait()
            stream.wait_event(other.event)
        return stream

    def submit(self, work: Work, after: Sequence[Recorded] = ()) -> Recorded:
        stream = self.wait(after)
        work.run()
        self.nbytes += work.nbytes
        return self.record(stream)

    def record(self, stream: Any) -> Recorded:
        done = self._streams.event()
        done.record(stream)
        return Recorded(done, None)


class Accelerator:
    """The accelerator that torch finds.

    Args:
        rates: of its lanes; measured if not given.
        streams: torch's.
    """

    def __init__(self, rates: Rates | None = None, streams: Streams | None = None) -> None:
        self.streams = TorchStreams() if streams is None else streams
        self.link = StreamLane("link", self.streams, reads=False)
        self.host = StreamLane("host", self.streams, reads=True)
        self.accelerator = CallerLane(self.streams)
        self._rates = rates
        self._sent: dict[int, Any] = {}  # pinned memory -> event after the last copy from it

    def rates(self) -> Rates:
        if self._rates is None:
            from wf_backends.hetegen.measure import measure_rates

            self._rates = measure_rates(self.streams)
        return self._rates

    def pageable_link(self) -> float:
        return self.rates().at(1, 1).link / 2  # the driver copies to pinned memory of its own first

    def pinned(self, nbytes: int) -> Tensor:
        try:
            return self.streams.pinned(nbytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise MemoryError(str(error)) from error

    def slab(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.streams.device)

    def resident(self, rows: Tensor) -> Tensor:
        here = torch.empty(rows.shape, dtype=rows.dtype, device=self.streams.device)
        return here.copy_(rows.detach())

    def place(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.streams.device)

    def copy(self, source: Tensor, pinned: Tensor | None, slab: Tensor) -> None:
        if pinned is None:
            slab.copy_(source)
            return
        if sent := self._sent.get(pinned.data_ptr()):
            sent.synchronize()  # in the link's thread
        pinned.copy_(source)
        slab.copy_(pinned, non_blocking=True)
        sent = self._sent[pinned.data_ptr()] = self.streams.event()
        sent.record(self.link.stream)

    def to_host(self, x: Tensor) -> tuple[Tensor, Sequence[Recorded]]:
        x_host = self.streams.pinned(*x.shape, dtype=x.dtype)
        x_host.copy_(x, non_blocking=True)
        return x_host, [self.accelerator.record(self.streams.current())]

    def from_host(self, y: Tensor, out: Tensor) -> None:
        pinned = self.streams.pinned(*y.shape, dtype=y.dtype)
        pinned.copy_(y)
        out.copy_(pinned, non_blocking=True)

    def wait(self, events: Sequence[Recorded]) -> None:
        self.accelerator.wait(events)

    def stop(self) -> None:
        for lane in (self.link, self.host):
            lane.thread.ask_to_stop()
        for lane in (self.link, self.host):
            lane.thread.join()
        self.link.stream.wait_event(self.accelerator.record(self.streams.current()).event)

    def close(self) -> None:
        self.stop()
        self.streams.synchronize()
        self._sent.clear()


@contextmanager
def _on(streams: Streams, stream: Any) -> Iterator[None]:
    """This thread's stream is `stream` meanwhile."""
    before = streams.current()
    streams.use(stream)
    try:
        yield
    finally:
        streams.use(before)
