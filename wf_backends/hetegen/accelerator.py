"""The lanes on a real accelerator, whichever torch finds: streams, events and pinned memory.

    link          a thread copies rows to pinned memory; its own stream copies them to a slab
    host          a thread computes rows into pinned memory; the caller's stream copies them
    accelerator   the caller's stream

The threads wait for the device. The caller waits for the threads only: for the host's rows of the
linear that it calls, and until the copies that the linear needs are on the link's stream. No stream
ever waits for a thread. (It could, and the caller would not have to wait; but code that holds
Python's GIL while it waits for the device, such as indexing a tensor with a number on the GPU,
would then block the thread, which needs the GIL.)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wf_backends.hetegen.device import Lanes, Run, Write
from wf_backends.hetegen.weights import Rates


class Streams:
    """Streams, events and pinned memory of torch's accelerator.

    Raises:
        ValueError: if torch finds no accelerator.
    """

    def __init__(self) -> None:
        if not torch.accelerator.is_available():
            raise ValueError(
                "torch finds no accelerator here; to try HeteGen without one pass device="
                "ShapedDevice(link_bytes_per_s=..., host_bytes_per_s=..., "
                "accelerator_bytes_per_s=...), or --shaped 1,3,20 on the command line"
            )
        self.device = torch.accelerator.current_stream().device

    @property
    def _is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def stream(self) -> torch.Stream:
        """A stream. On CUDA it is torch.cuda.Stream: before torch 2.11 torch.cuda.Event takes no
        other, and reads beyond the end of a torch.Stream."""
        return torch.cuda.Stream(self.device) if self._is_cuda else torch.Stream(self.device)

    def event(self, timed: bool = False) -> torch.Event:
        """An event. On CUDA it is torch.cuda.Event: waiting for it frees the core (torch.Event
        spins, blocking or not), and recording it releases Python's GIL."""
        if self._is_cuda:
            return torch.cuda.Event(enable_timing=timed, blocking=not timed)
        return torch.Event(self.device, enable_timing=timed, blocking=not timed)

    def current(self) -> torch.Stream:
        module = torch.cuda if self._is_cuda else torch.accelerator
        return module.current_stream(self.device)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def clock(self) -> float:
        """The time in seconds, when all work on the streams has ended."""
        self.synchronize()
        return time.perf_counter()

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def copy(self, stream: torch.Stream, source: Tensor, target: Tensor) -> None:
        """Put a copy on the stream."""
        with torch.cuda.stream(stream) if isinstance(stream, torch.cuda.Stream) else stream:
            target.copy_(source, non_blocking=True)


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """The end of the work that a stream has at some time.

    Attributes:
        event: marks it.
        recording: the thread's work that records the event; None: it is recorded.
    """

    event: Any
    recording: Future[float] | None = None


@dataclass(frozen=True, slots=True)
class HostOutput:
    """Host memory into which a thread computes rows, to be copied to `out` on the accelerator."""

    computing: Future[float]
    memory: Tensor
    out: Tensor


class Accelerator(Lanes):
    """The accelerator that torch finds.

    Args:
        rates: of its lanes; None: they are measured for the dtype of the weights, with copies as
            `pin_memory` of `dispatch_model` says.
        streams: torch's; None: those of the accelerator that torch finds.
    """

    def __init__(self, rates: Rates | None = None, streams: Streams | None = None) -> None:
        super().__init__("link", "host")
        self.streams, self._rates = streams or Streams(), rates
        self._link_stream = self.streams.stream()
        # Pinned memory of the host's inputs and outputs, and when the last output was copied from
        # it: to allocate it anew takes 50 us, of 500 of a call.
        self._memory: dict[str, Tensor] = {}
        self._copied_out: Any = None

    def rates(self, dtype: torch.dtype, pin_memory: bool | str = True) -> Rates:
        if self._rates is None:
            from wf_backends.hetegen.measure import measure_rates

            return measure_rates(self.streams, dtype, pin_memory == "weights")
        return self._rates

    def pinned(self, nbytes: int) -> Tensor:
        return self.streams.pinned((nbytes,), torch.uint8)

    def place(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.streams.device, copy=True)

    def copy(
        self, rows: Tensor, pinned: Tensor | None, slab: Tensor, after: StreamEnd | None
    ) -> StreamEnd:
        copied = self.streams.event()

        def run() -> None:
            source = rows if pinned is None else pinned.copy_(rows)
            self.streams.copy(self._link_stream, source, slab)
            copied.record(self._link_stream)

        wait = None if after is None else after.event.synchronize
        return StreamEnd(copied, self.submit("link", run, after=wait))

    def compute(self, run: Run, nbytes: int, after: StreamEnd | None) -> StreamEnd:
        if after is not None:
            if after.recording is not None:
                after.recording.result()
            after.event.wait(self.streams.current())
        run()
        return StreamEnd(self._record())

    def compute_on_host(self, write: Write, x: Tensor, out: Tensor, nbytes: int) -> HostOutput:
        host_x, memory = self._host_memory("x", x), self._host_memory("out", out)
        if self._copied_out is not None:
            self._copied_out.wait(self.streams.current())
        host_x.copy_(x, non_blocking=True)
        wait = self._record().synchronize
        computing = self.submit("host", partial(write, host_x, memory), after=wait)
        return HostOutput(computing, memory, out)

    def _host_memory(self, name: str, activation: Tensor) -> Tensor:
        """Host memory of an activation's shape and dtype, pinned unless none is left."""
        nbytes = activation.nbytes
        memory = self._memory.get(name)
        if memory is None or memory.nbytes < nbytes:
            with torch.inference_mode(False):  # also written to by callers without that mode
                try:
                    memory = self._memory[name] = self.pinned(nbytes)
                except RuntimeError:
                    return torch.empty(activation.shape, dtype=activation.dtype)
        return memory[:nbytes].view(activation.dtype).view(activation.shape)

    def wait(self, events: Sequence[Any]) -> Any:
        self.check()
        for event in events:
            if isinstance(event, HostOutput):  # a StreamEnd is on the caller's stream already
                event.computing.result()
                self.streams.copy(self.streams.current(), event.memory, event.out)
        self._copied_out = self.now()
        return self._copied_out

    def _record(self, timed: bool = False) -> Any:
        """An event at the end of the work that the caller's stream has now."""
        event = self.streams.event(timed)
        event.record(self.streams.current())
        return event

    def now(self) -> Any:
        return self._record(timed=True)

    def seconds(self, start: Any, end: Any) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def stop(self) -> None:
        super().stop()
        self.streams.synchronize()  # work on the streams still uses slabs and outputs

    def close(self) -> None:
        super().close()
        self._memory.clear()
