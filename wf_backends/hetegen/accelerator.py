"""A real accelerator, of whatever kind torch finds: streams, events and pinned memory.

    link          a thread fills pinned memory, a stream of its own copies it to a slab
    host          a thread computes rows in pinned memory, at the join the caller's stream copies it
    accelerator   the caller's stream

On CUDA streams and threads wait for each other by counts in pinned memory, and the caller for
nothing. Elsewhere threads wait for events, the link's thread puts its copy on the stream itself,
and the caller waits until it has, and for the host's rows.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wf_backends.hetegen.cuda_count import CudaCount
from wf_backends.hetegen.lane_thread import Lanes, LaneThread, Run, Stop, Write
from wf_backends.hetegen.law import Rates
from wf_backends.hetegen.pinned import PinnedPool

LOOK = 2e-5  # seconds between two looks of a thread at a count


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
        """An event. CUDA's own leaves the core to others while a thread waits for it (torch.Event
        spins, blocking or not), and gives Python's lock back while it is recorded."""
        if self.device.type == "cuda":
            return torch.cuda.Event(enable_timing=timed, blocking=not timed)
        return torch.Event(self.device, enable_timing=timed, blocking=not timed)

    def current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def copy(self, stream: torch.Stream, source: Tensor, to: Tensor) -> None:
        """Put a copy on the stream."""
        with stream:
            to.copy_(source, non_blocking=True)

    def count(self) -> CudaCount | None:
        """None where there is none, with a warning where there could be one."""
        if self.device.type != "cuda" or torch.version.cuda is None:
            return None
        try:
            return CudaCount(self.pinned((1,), torch.int32), self.current())
        except (ImportError, AttributeError, RuntimeError) as error:
            warnings.warn(
                f"no counts for CUDA's streams ({error}): the thread that calls the model waits "
                "for the host's rows of each linear; torch 2.11 and pip install cuda-bindings "
                "may mend it",
                stacklevel=2,
            )
            return None


@dataclass(frozen=True, slots=True)
class Recorded:
    """The end of what is on a stream now.

    Attributes:
        event: of it.
        by: the thread's work that records the event; None: it was.
        reached: tells whether the stream is there; None: a thread waits for the event.
    """

    event: Any
    by: Future[float] | None = None
    reached: Callable[[], bool] | None = None


class Marks:
    """Tells threads, without the driver, how far a stream is.

    Args:
        count: that the stream raises, if there is one.
    """

    def __init__(self, count: CudaCount | None) -> None:
        self._count, self._last = count, 0

    def mark(self, stream: Any) -> Callable[[], bool] | None:
        """Tells whether the stream has done what is on it now."""
        if self._count is None:
            return None
        self._last += 1
        self._count.raise_on(stream, self._last)
        return partial(self._count.reached, self._last)


@dataclass(frozen=True, slots=True)
class Filled:
    """Memory that a thread fills, to be copied to `out` on the accelerator.

    Attributes:
        by: the thread's work.
        count: of its gate; None: the caller waits instead.
        pinned: what is free again when it was copied.
    """

    by: Future[float]
    memory: Tensor
    out: Tensor
    count: int | None
    pinned: tuple[Tensor, ...] = ()


class GatedThread(LaneThread):
    """A thread that fills memory, and a count (the gate) for which a stream waits until it has."""

    def __init__(self, name: str, stop: Stop, gate: CudaCount | None) -> None:
        super().__init__(name, stop)
        self.gate, self._count = gate, 0

    def run_after(self, before: Recorded | None, run: Run) -> Future[float]:
        """Have the thread wait for what is recorded by then, and run.

        It gets no event that it does not need: the end of one is a call of the driver, too.
        """
        if before is None:
            return self.submit(run)
        if before.reached is None:
            return self.submit(run, after=partial(_wait_for_event, before.event))
        return self.submit(run, after=partial(self._look, before.reached))

    def _look(self, reached: Callable[[], bool]) -> float:
        while not reached():
            self._stop.wait(0)
            time.sleep(LOOK)
        return 0.0  # when it was does not matter to a work without a rate

    def fill(self, memory: Tensor, out: Tensor, gated: bool, by: Future[float]) -> Filled:
        """What the thread's work fills; if it is gated a stream may wait for it."""
        if self.gate is None or not gated:
            return Filled(by, memory, out, None)
        self._count += 1
        by.add_done_callback(partial(self._open, self.gate, self._count, memory))
        return Filled(by, memory, out, self._count)

    def hold(self, stream: Any, filled: Filled) -> None:
        """What is put on the stream from now on finds the memory filled."""
        if self.gate is None or filled.count is None:
            filled.by.result()
        else:
            self.gate.hold(stream, filled.count)

    @staticmethod
    def _open(gate: CudaCount, count: int, memory: Tensor, filled: Future[float]) -> None:
        try:
            if filled.exception():  # nobody takes these values for results
                memory.view(torch.uint8).fill_(0xFF)  # NaN, in any floating-point type
        finally:
            gate.raise_to(count)


def _wait_for_event(event: Any) -> float:
    event.synchronize()
    return 0.0


class Accelerator(Lanes):
    """The accelerator that torch finds.

    What a lane raises the next call of a split linear raises, or `close` where none comes: until
    then its rows are NaN.

    Args:
        rates: of its lanes; measured for the type of the weights if not given.
        streams: torch's.
    """

    def __init__(self, rates: Rates | None = None, streams: Streams | None = None) -> None:
        super().__init__()
        self.streams, self._rates = streams or Streams(), rates
        self._link, self._host = (
            GatedThread(name, self._stop, self.streams.count()) for name in ("link", "host")
        )
        self._link_stream = self.streams.stream()
        self._of_caller, self._of_link = (Marks(self.streams.count()) for _ in range(2))
        self._end: tuple[Any, Any] | None = None  # the caller's last stream, the last call's end
        self._pool = PinnedPool(self.streams.pinned)
        self.lanes = {"link": self._link, "host": self._host}

    def rates(self, dtype: torch.dtype) -> Rates:
        if self._rates is None:
            from wf_backends.hetegen.measure import measure_rates

            return measure_rates(self.streams, dtype)
        return self._rates

    def pinned(self, nbytes: int) -> Tensor:
        try:
            return self.streams.pinned((nbytes,), torch.uint8)
        except RuntimeError as error:
            raise MemoryError(str(error)) from error

    def place(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.streams.device, copy=True)

    def copy(
        self, rows: Tensor, pinned: Tensor | None, slab: Tensor, after: Recorded | None
    ) -> Recorded:
        done, stream = self.streams.event(), self._link_stream

        def put(source: Tensor) -> None:
            self.streams.copy(stream, source, slab)
            done.record(stream)

        def by_thread() -> None:
            put(rows if pinned is None else pinned.copy_(rows))

        if pinned is None or self._link.gate is None:
            return Recorded(done, self._link.run_after(after, by_thread))
        work = self._link.run_after(after, partial(pinned.copy_, rows))
        filled = self._link.fill(pinned, slab, True, work)
        if after is not None:
            after.event.wait(stream)
        self._link.hold(stream, filled)
        put(pinned)
        return Recorded(done, None, self._of_link.mark(stream))

    def compute(self, run: Run, nbytes: int, after: Recorded | None) -> Recorded | None:
        """None if nobody waits for it: it has memory of its own."""
        if after is None:
            run()
            return None
        if after.by is not None:
            after.by.result()
        stream = self._stream()
        after.event.wait(stream)
        run()
        return self._record(stream)

    def on_host(self, write: Write, x: Tensor, out: Tensor, nbytes: int) -> Filled:
        (x_host, _), (memory, pinned) = self._host_memory(x), self._host_memory(out)
        stream = self._stream()
        x_host.copy_(x, non_blocking=True)
        work = self._host.run_after(self._record(stream), partial(write, x_host, memory))
        filled = self._host.fill(memory, out, pinned, work)
        return replace(filled, pinned=(x_host, memory)) if pinned else filled

    def _host_memory(self, like: Tensor) -> tuple[Tensor, bool]:
        """(memory for an activation, whether it is pinned), as it is while there is some."""
        try:
            return self._pool.take(like), True
        except RuntimeError:
            return torch.empty(like.shape, dtype=like.dtype), False

    def wait(self, events: Sequence[Any]) -> Any:
        self._stop.check()
        current, pinned = self.streams.current(), list[Tensor]()
        for event in events:
            if isinstance(event, Filled):  # what was computed is on the caller's stream
                self._host.hold(current, event)
                self.streams.copy(current, event.memory, event.out)
                pinned += event.pinned
        now = self.now()
        for memory in pinned:
            self._pool.give(memory, now)
        self._end = current, now
        return now

    def _stream(self) -> Any:
        """The caller's, behind what another one was given before: marks are in order."""
        current = self.streams.current()
        if self._end is not None and self._end[0] != current:
            self._end[1].wait(current)
        return current

    def _record(self, stream: Any) -> Recorded:
        """The end of what is on the caller's stream."""
        done = self.streams.event()
        done.record(stream)
        return Recorded(done, None, self._of_caller.mark(stream))

    def now(self) -> Any:
        now = self.streams.event(timed=True)
        now.record(self.streams.current())
        return now

    def seconds(self, start: Any, end: Any) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def stop(self) -> None:
        super().stop()
        self.streams.synchronize()  # what is on the streams still uses slabs and outputs
        self._pool.clear()

    def close(self) -> None:
        self.streams.synchronize()  # the caller's stream may wait for the host's rows
        try:
            self._stop.check()
        finally:
            self.stop()
