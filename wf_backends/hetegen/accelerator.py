"""The lanes on a real accelerator, whichever torch finds: streams, events and pinned memory.

    link          a thread copies rows to pinned memory; its own stream copies them to a slab
    host          a thread computes rows into pinned memory; the caller's stream copies them
    accelerator   the caller's stream

On CUDA the threads are workers of C++: streams and workers wait for each other's flags, and the
caller waits for nothing. Elsewhere, and for copies of memory that is not pinned, they are threads
of Python. No stream waits for those: code that holds the GIL while it waits for the device, such as
indexing a tensor with a number on the GPU, would block them. The caller waits instead: for the
host's rows of the linear that it calls, and until the copies that the linear needs are on the
link's stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wf_backends.hetegen.device import OPERATIONS, Lanes, Operation, Run
from wf_backends.hetegen.streams import Streams
from wf_backends.hetegen.weights import Rates
from wf_backends.hetegen.worker import Worker, make_workers


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
    """Host memory into which a thread computes rows, to be copied to `out` on the accelerator.

    Attributes:
        finish: has the stream of the call, or else the caller, wait until they are computed.
    """

    memory: Tensor
    out: Tensor
    finish: Callable[[], object]


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
        self._workers: dict[str, Worker] = {}  # by lane; made at the first use
        # Pinned memory of a slab -> the worker's last task with it.
        self._staged: dict[int, int] = {}
        # Pinned memory of the host's inputs and outputs, and when the last output was copied from
        # it: to allocate it anew takes 50 us.
        self._memory: dict[str, Tensor] = {}
        self._copied_out: Any = None

    def rates(self, dtype: torch.dtype, pin_memory: bool | str = True) -> Rates:
        if self._rates is None:
            from wf_backends.hetegen.measure import measure_rates

            return measure_rates(self.streams, dtype, pin_memory == "weights")
        return self._rates

    def _worker(self, lane: str) -> Worker | None:
        """The lane's worker; None: its thread is one of Python."""
        if not self._workers:
            self._workers = make_workers(self.streams, self.busy_seconds)
        return self._workers.get(lane)

    def pinned(self, nbytes: int) -> Tensor:
        return self.streams.pinned((nbytes,), torch.uint8)

    def place(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.streams.device, copy=True)

    def copy(
        self, rows: Tensor, pinned: Tensor | None, slab: Tensor, after: StreamEnd | None
    ) -> StreamEnd:
        worker = self._worker("link")
        if worker is None or (pinned is None and not self.streams.is_pinned(rows)):
            return self._copy_in_thread(rows, pinned, slab, after)
        if after is not None:
            after.event.wait(self._link_stream)
        if pinned is None:
            self.streams.copy(self._link_stream, rows, slab)
        else:
            last_task = self._staged.get(pinned.data_ptr(), 0)
            task = self._staged[pinned.data_ptr()] = worker.thread.copy(rows, pinned, last_task)
            worker.finish_before(self._link_stream, task)
            self.streams.copy(self._link_stream, pinned, slab)
            worker.start_after(self._link_stream, task)
        return StreamEnd(self._record(self._link_stream))

    def _copy_in_thread(
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
        return StreamEnd(self._record(self.streams.current()))

    def compute_on_host(
        self, operation: Operation, weight: Tensor, x: Tensor, out: Tensor, nbytes: int
    ) -> HostOutput:
        host_x, memory = self._host_memory("x", x), self._host_memory("out", out)
        stream, worker = self.streams.current(), self._worker("host")
        if self._copied_out is not None:
            self._copied_out.wait(stream)
        host_x.copy_(x, non_blocking=True)
        if worker is not None:
            task = getattr(worker.thread, operation)(weight, host_x, memory)
            worker.start_after(stream, task)
            return HostOutput(memory, out, partial(worker.finish_before, stream, task))
        run = partial(OPERATIONS[operation], weight, host_x, memory)
        computing = self.submit("host", run, after=self._record(stream).synchronize)
        return HostOutput(memory, out, computing.result)

    def _host_memory(self, name: str, activation: Tensor) -> Tensor:
        """Host memory of an activation's shape and dtype, pinned unless none is left."""
        nbytes = activation.nbytes
        memory = self._memory.get(name)
        if memory is None or memory.nbytes < nbytes:
            with torch.inference_mode(False):  # also written to by callers without that mode
                try:
                    memory = self._memory[name] = self.pinned(nbytes)
                except RuntimeError:
                    return torch.empty(activation.shape, dtype=activation.dtype, device="cpu")
        return memory[:nbytes].view(activation.dtype).view(activation.shape)

    def wait(self, events: Sequence[Any]) -> Any:
        self.check()
        for event in events:
            if isinstance(event, HostOutput):  # a StreamEnd is on the caller's stream already
                event.finish()
                self.streams.copy(self.streams.current(), event.memory, event.out)
        self._copied_out = self.now()
        return self._copied_out

    def check(self, seconds: float = 0.0) -> None:
        super().check(seconds)
        for worker in self._workers.values():
            worker.thread.check()

    def has_raised(self) -> bool:
        return any(worker.thread.has_raised() for worker in self._workers.values())

    def _record(self, stream: Any, timed: bool = False) -> Any:
        """An event at the end of the work that the stream has now."""
        event = self.streams.event(timed)
        event.record(stream)
        return event

    def now(self) -> Any:
        return self._record(self.streams.current(), timed=True)

    def seconds(self, start: Any, end: Any) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def stop(self) -> None:
        super().stop()
        for worker in self._workers.values():
            worker.thread.cancel()
        self.streams.synchronize()  # work on the streams still uses slabs and outputs

    def close(self) -> None:
        """As of any device. Raises the error of a worker that no call has raised yet."""
        try:
            self.streams.synchronize()
            self.check()
        finally:
            super().close()
            for worker in self._workers.values():
                worker.close()
            self._workers = {}
            self._memory.clear()
            self._staged.clear()
