"""A real accelerator, of whatever kind torch finds: streams, events and pinned memory.

The link's lane is a thread that fills pinned memory and puts copies on a stream of its own; the
host's lane is a thread that computes and puts results on another. What the accelerator computes
goes on the caller's stream. No call of a split linear waits for the accelerator: streams wait for
events. A stream can only wait for an event that was recorded, so the caller does wait until a
lane's thread has put its work on its stream.

It has not run on an accelerator yet; tests run it on a stand-in for streams.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wf_backends.hetegen.device import Work
from wf_backends.hetegen.lane_thread import LaneThread, Stop, end_lanes
from wf_backends.hetegen.law import Rates


class Streams:
    """What is asked of torch, for the accelerator that it finds.

    Raises:
        ValueError: if there is none.
    """

    def __init__(self) -> None:
        if not torch.accelerator.is_available():
            raise ValueError(
                "torch finds no accelerator here; to try HeteGen without one pass device="
                "ShapedDevice(link_bytes_per_s=..., host_bytes_per_s=..., "
                "accelerator_bytes_per_s=...), or --shaped 1,3,20 on the command line"
            )
        self.device = torch.accelerator.current_stream().device

    def stream(self) -> torch.Stream:
        return torch.Stream(self.device)

    def event(self) -> torch.Event:
        return torch.Event(self.device)

    def current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)


@dataclass(frozen=True, slots=True)
class Recorded:
    """An event of a stream, and the thread's work that records it (None: it was)."""

    event: Any
    by: Future[float] | None


class StreamLane(LaneThread):
    """A thread that puts work on a stream of its own, when what it comes after is done."""

    def __init__(self, name: str, stop: Stop, streams: Streams) -> None:
        super().__init__(name, stop)
        self.stream, self._streams = streams.stream(), streams

    def submit(self, work: Work, after: Sequence[Recorded] = ()) -> Recorded:  # type: ignore[override]
        done = self._streams.event()

        def run() -> None:
            for other in after:
                other.event.synchronize()
            with self.stream:
                work.run()
            done.record(self.stream)

        by = [other.by for other in after if other.by is not None]
        return Recorded(done, super().submit(Work(run, work.nbytes), by))


class CallerLane:
    """Puts work on the caller's stream, at once. Its time is not measured."""

    def __init__(self, streams: Streams) -> None:
        self.busy_seconds, self.nbytes = 0.0, 0
        self._streams = streams

    def wait(self, events: Sequence[Recorded]) -> None:
        """The caller's stream comes after these events."""
        for other in events:
            if other.by is not None:
                other.by.result()
            self._streams.current().wait_event(other.event)

    def submit(self, work: Work, after: Sequence[Recorded] = ()) -> Recorded:
        self.wait(after)
        work.run()
        self.nbytes += work.nbytes
        return self.record()

    def record(self) -> Recorded:
        """An event at the end of what is on the caller's stream."""
        done = self._streams.event()
        done.record(self._streams.current())
        return Recorded(done, None)


class Accelerator:
    """The accelerator that torch finds.

    Args:
        rates: of its lanes; measured if not given.
        streams: torch's.
    """

    def __init__(self, rates: Rates | None = None, streams: Streams | None = None) -> None:
        self.streams = Streams() if streams is None else streams
        self._stop = Stop()
        self._threads = [StreamLane(name, self._stop, self.streams) for name in ("link", "host")]
        self._caller = CallerLane(self.streams)
        self.lanes = dict(link=self._threads[0], host=self._threads[1], accelerator=self._caller)
        self._rates = rates

    def rates(self) -> Rates:
        if self._rates is None:
            from wf_backends.hetegen.measure import measure_rates

            self._rates = measure_rates(self.streams)
        return self._rates

    def pinned(self, nbytes: int) -> Tensor:
        try:
            return self.streams.pinned(nbytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise MemoryError(str(error)) from error

    def place(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.streams.device, copy=True)

    def copy(self, source: Tensor, pinned: Tensor | None, slab: Tensor) -> None:
        if pinned is None:
            slab.copy_(source)
        else:  # what was copied from it before was read before this
            slab.copy_(pinned.copy_(source), non_blocking=True)

    def to_host(self, x: Tensor) -> tuple[Tensor, Sequence[Recorded]]:
        x_host = self._host_memory(x)
        x_host.copy_(x, non_blocking=True)
        return x_host, [self._caller.record()]

    def from_host(self, write: Callable[[Tensor], object], out: Tensor) -> None:
        y_host = self._host_memory(out)
        write(y_host)
        out.copy_(y_host, non_blocking=True)

    def _host_memory(self, like: Tensor) -> Tensor:
        """For an activation: pinned, or pageable where nothing more can be pinned."""
        try:
            return self.streams.pinned(*like.shape, dtype=like.dtype)
        except RuntimeError:
            return torch.empty(like.shape, dtype=like.dtype)

    def wait(self, events: Sequence[Recorded]) -> float:
        self._caller.wait(events)
        return time.perf_counter()

    def stop(self) -> None:
        end_lanes(self._threads, self._stop)
        self._threads[0].stream.wait_event(self._caller.record().event)

    def close(self) -> None:
        self.stop()
        self.streams.synchronize()
