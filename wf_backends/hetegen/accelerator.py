"""A real accelerator, of whatever kind torch finds: streams, events and pinned memory.

    link          a thread fills pinned memory, and has a stream of its own copy it to a slab
    host          a thread computes rows in pinned memory, which the caller's stream copies
    accelerator   the caller's stream

The threads wait for the device, and the caller for the threads: for the host's rows of the linear
that it calls, and until a copy that the linear needs is on its stream. It never waits for the
device, and leaves no work on a stream that only a thread could end. (A stream can be held for a
thread, so that the caller runs on; but code that keeps Python's lock while it waits for the device,
such as a tensor indexed by a number on the GPU, then waits for a thread that needs this lock.)
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wf_backends.hetegen.device import Lanes, Run, Write
from wf_backends.weights import Rates


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


@dataclass(frozen=True, slots=True)
class Recorded:
    """The end of what was put on a stream.

    Attributes:
        event: of it.
        by: the thread's work that records the event; None: it was.
    """

    event: Any
    by: Future[float] | None = None


@dataclass(frozen=True, slots=True)
class Filled:
    """Memory that a thread fills, to be copied to `out` on the accelerator."""

    by: Future[float]
    memory: Tensor
    out: Tensor


class Accelerator(Lanes):
    """The accelerator that torch finds.

    Args:
        rates: of its lanes; measured for the type of the weights if not given.
        streams: torch's.
    """

    def __init__(self, rates: Rates | None = None, streams: Streams | None = None) -> None:
        super().__init__("link", "host")
        self.streams, self._rates = streams or Streams(), rates
        self._link_stream = self.streams.stream()

    def rates(self, dtype: torch.dtype) -> Rates:
        if self._rates is None:
            from wf_backends.hetegen.measure import measure_rates

            return measure_rates(self.streams, dtype)
        return self._rates

    def pinned(self, nbytes: int) -> Tensor:
        return self.streams.pinned((nbytes,), torch.uint8)

    def place(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.streams.device, copy=True)

    def copy(
        self, rows: Tensor, pinned: Tensor | None, slab: Tensor, after: Recorded | None
    ) -> Recorded:
        done = self.streams.event()

        def run() -> None:
            source = rows if pinned is None else pinned.copy_(rows)
            self.streams.copy(self._link_stream, source, slab)
            done.record(self._link_stream)

        return Recorded(done, self.submit("link", run, after=after and after.event.synchronize))

    def compute(self, run: Run, nbytes: int, after: Recorded | None) -> Recorded:
        if after is not None:
            if after.by is not None:
                after.by.result()
            after.event.wait(self.streams.current())
        run()
        return self._record()

    def on_host(self, write: Write, x: Tensor, out: Tensor, nbytes: int) -> Filled:
        x_host, memory = self._host_memory(x), self._host_memory(out)
        x_host.copy_(x, non_blocking=True)
        there = self._record().event.synchronize
        work = self.submit("host", partial(write, x_host, memory), after=there)
        return Filled(work, memory, out)

    def _host_memory(self, like: Tensor) -> Tensor:
        """Memory for an activation, pinned while there is some."""
        try:
            return self.streams.pinned(like.shape, like.dtype)
        except RuntimeError:
            return torch.empty(like.shape, dtype=like.dtype)

    def wait(self, events: Sequence[Any]) -> Any:
        self.check()
        for event in events:
            if isinstance(event, Filled):  # what was computed is on the caller's stream
                event.by.result()
                self.streams.copy(self.streams.current(), event.memory, event.out)
        return self.now()

    def _record(self, timed: bool = False) -> Recorded:
        """The end of what is on the caller's stream."""
        done = self.streams.event(timed)
        done.record(self.streams.current())
        return Recorded(done)

    def now(self) -> Any:
        return self._record(timed=True).event

    def seconds(self, start: Any, end: Any) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def stop(self) -> None:
        super().stop()
        self.streams.synchronize()  # what is on the streams still uses slabs and outputs
