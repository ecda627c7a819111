"""A real accelerator, of whatever kind torch finds: streams, events and pinned memory.

The lanes of the link and of the host are threads, which fill pinned memory, each with a stream,
which copies what is filled. What the accelerator computes goes on the caller's stream. The caller
waits for nothing: it puts copies behind gates, which the threads open, and has its own stream wait
for the copies. Where there is no gate (accelerators other than CUDA's) a thread puts its copies on
the stream itself, and the caller waits until it has.

It has not run on an accelerator yet; tests run it on a stand-in for streams.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wf_backends.hetegen.device import Steps, Work
from wf_backends.hetegen.gate import CudaGate, Gate
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

    def event(self, timed: bool = False) -> torch.Event:
        return torch.Event(self.device, enable_timing=timed, blocking=not timed)

    def current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def copy(self, stream: torch.Stream, pinned: Tensor, to: Tensor) -> None:
        """Put a copy on the stream."""
        with stream:
            to.copy_(pinned, non_blocking=True)

    def gate(self) -> Gate | None:
        """None where there is none, with a warning where there could be one."""
        if self.device.type != "cuda" or torch.version.cuda is None:
            return None
        try:
            return CudaGate(self.pinned(1, dtype=torch.int32), self.stream())
        except (ImportError, RuntimeError) as error:
            warnings.warn(
                f"no gates for CUDA's streams ({error}): the thread that calls the model waits "
                "for the host's rows of each linear; pip install cuda-bindings may mend it",
                stacklevel=2,
            )
            return None


@dataclass(frozen=True, slots=True)
class Recorded:
    """An event of a stream, and the thread's work that records it (None: it was)."""

    event: Any
    by: Future[float] | None


class StreamLane(LaneThread):
    """A thread that fills pinned memory, and a stream that copies what it has filled."""

    def __init__(self, name: str, stop: Stop, streams: Streams) -> None:
        super().__init__(name, stop)
        self._streams, self._gate, self._count = streams, streams.gate(), 0
        self._gated, self._ungated = streams.stream(), streams.stream()

    def submit(self, work: Work, after: Sequence[Recorded] = ()) -> Recorded:  # type: ignore[override]
        done = self._streams.event()
        if self._gate is None or work.staged is None:
            return Recorded(done, self._by_thread(work, after, done))
        self._behind_gate(self._gate, work, *work.staged, after)
        done.record(self._gated)
        return Recorded(done, None)

    def _behind_gate(
        self, gate: Gate, work: Work, pinned: Tensor, to: Tensor, after: Sequence[Recorded]
    ) -> None:
        """The caller puts the copy on the stream, where it waits until the thread is done."""
        self._count += 1
        count = self._count

        def open_gate(filled: Future[float]) -> None:
            try:
                if filled.exception():  # nobody takes these values for results
                    pinned.view(torch.uint8).fill_(0xFF)  # NaN, in any floating-point type
            finally:
                gate.open(count)

        self._in_thread(work, after, work.run).add_done_callback(open_gate)
        self.follow(after)
        gate.hold(self._gated, count)
        self._streams.copy(self._gated, pinned, to)

    def _by_thread(self, work: Work, after: Sequence[Recorded], done: Any) -> Future[float]:
        """The thread puts all on its stream, for which the caller waits."""

        def run() -> None:
            with self._ungated:
                work.run()
            if work.staged is not None:
                self._streams.copy(self._ungated, *work.staged)
            done.record(self._ungated)

        return self._in_thread(work, after, run)

    def _in_thread(
        self, work: Work, after: Sequence[Recorded], run: Callable[[], object]
    ) -> Future[float]:
        def when_due() -> None:
            for other in after:
                other.event.synchronize()
            run()

        by = [other.by for other in after if other.by is not None]
        return super().submit(Work(when_due, work.nbytes), by)

    def follow(self, events: Sequence[Recorded]) -> None:
        """What comes on the streams comes after these events, so far as they are recorded."""
        for other in events:
            self._gated.wait_event(other.event)
            self._ungated.wait_event(other.event)


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

    def record(self, timed: bool = False) -> Recorded:
        """An event at the end of what is on the caller's stream."""
        done = self._streams.event(timed)
        done.record(self._streams.current())
        return Recorded(done, None)


class Accelerator:
    """The accelerator that torch finds.

    What a lane raises the next call of a split linear raises, or `close` where none comes: until
    then its rows are NaN.

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

    def copy(self, source: Tensor, pinned: Tensor | None, slab: Tensor) -> Steps:
        if pinned is None:
            return partial(slab.copy_, source), None
        return partial(pinned.copy_, source), (pinned, slab)  # an earlier copy was read before

    def to_host(self, x: Tensor) -> tuple[Tensor, Sequence[Recorded]]:
        x_host = self._pinned_like(x)
        if x_host is None:
            x_host = torch.empty(x.shape, dtype=x.dtype)
        x_host.copy_(x, non_blocking=True)
        return x_host, [self._caller.record()]

    def from_host(self, write: Callable[[Tensor], object], out: Tensor) -> Steps:
        y_host = self._pinned_like(out)
        if y_host is None:
            return partial(_write_pageable, write, out), None
        return partial(write, y_host), (y_host, out)

    def _pinned_like(self, x: Tensor) -> Tensor | None:
        """For an activation; None where nothing more can be pinned."""
        try:
            return self.streams.pinned(*x.shape, dtype=x.dtype)
        except RuntimeError:
            return None

    def wait(self, events: Sequence[Recorded]) -> Any:
        self._stop.check()
        self._caller.wait(events)
        return self.now()

    def now(self) -> Any:
        return self._caller.record(timed=True).event

    def seconds(self, start: Any, end: Any) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def stop(self) -> None:
        end_lanes(self._threads, self._stop)
        self._threads[0].follow([self._caller.record()])

    def close(self) -> None:
        error = self._stop.error
        self.stop()
        self.streams.synchronize()
        if error is not None:
            raise error


def _write_pageable(write: Callable[[Tensor], object], out: Tensor) -> None:
    y_host = torch.empty(out.shape, dtype=out.dtype)
    write(y_host)
    out.copy_(y_host)
