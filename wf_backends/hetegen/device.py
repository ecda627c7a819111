"""The interface of a device with three lanes, and a device of threads without an accelerator."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from wf_backends.hetegen.weights import LANE_NAMES, Rates

THREAD_CALL_SECONDS = 2e-4  # to submit work to a thread and wait for it, on a shared core
End = Future[float]  # the time at which work ended
Run = Callable[[], object]
Operation = Literal["multiply", "look_up"]


def multiply(weight: Tensor, x: Tensor, out: Tensor) -> None:
    """x (n, columns) times weight (columns, rows) into out (n, rows)."""
    torch.mm(x, weight, out=out)


def look_up(weight: Tensor, ids: Tensor, out: Tensor) -> None:
    """Rows ids (...) of weight (rows, columns) into out (..., columns)."""
    out.copy_(F.embedding(ids, weight))


# What a thread of Python computes; worker.cpp has the same.
OPERATIONS: dict[Operation, Callable[[Tensor, Tensor, Tensor], None]] = {
    "multiply": multiply,
    "look_up": look_up,
}


class Lanes:
    """The threads of a device's lanes. A device also has these methods:

        copy(rows, pinned, slab, after)          on the link: copy rows of a weight into a slab,
                                                 through pinned memory if it is not None
        compute(run, nbytes, after)              on the accelerator: run(), which reads nbytes of a
                                                 weight
        compute_on_host(operation, weight, x, out, nbytes)
                                                 on the host; x and out are on the accelerator
        wait(events)                             order the caller's next work after these events;
                                                 returns the moment when they end
        now()                                    the moment when the caller's work so far ends
        seconds(start, end)                      seconds between two moments; waits for them
        rates(dtype, pin_memory)                 the lanes' rates for one token and weights of dtype
        pinned(nbytes)                           pinned memory, (nbytes,) uint8; MemoryError or
                                                 torch's RuntimeError if none is left
        place(tensor)                            a copy in the accelerator's memory

    `copy`, `compute` and `compute_on_host` return at once, with an event: the end of their work.
    `wait` raises the work's error, if there is one by then. `after` is the event of the previous
    work with the same slab; None if there was none.

    Args:
        threads: the lanes that are threads. They start with their first work.

    Attributes:
        busy_seconds: lane -> seconds that its thread has worked so far, () float64.
        in_use: whether a model is split over the device.
    """

    def __init__(self, *threads: str) -> None:
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._reset_busy_seconds(threads)
        self._end_times = dict.fromkeys(threads, 0.0)  # lane -> when its last work ended
        self._failed = threading.Event()
        self._error: BaseException | None = None  # the first one; all later work raises it too
        self.in_use = False

    def submit(
        self, lane: str, run: Run, seconds: float = 0.0, after: Callable[[], Any] | None = None
    ) -> Future[float]:
        """Have a lane's thread call `run`. The future is the time at which the work ended.

        Args:
            seconds: the work takes at least this long.
            after: waits for the work's inputs; may return the time at which they were ready.
        """
        if lane not in self._threads:
            self._threads[lane] = ThreadPoolExecutor(1, lane)
        now = time.perf_counter()
        return self._threads[lane].submit(self._work, lane, [run], seconds, after, now)

    def _work(
        self,
        lane: str,
        run: list[Run],
        seconds: float,
        after: Callable[[], Any] | None,
        submitted: float,
    ) -> float:
        """Run the work; returns the time at which it ended.

        With a minimum of `seconds` that is the time at which it should have ended, even if its
        thread woke up later. `run` has one item, which is removed: the work's tensors are freed
        before anybody knows that it ended.
        """
        try:
            ready = after() if after is not None else None
            start = max(submitted, self._end_times[lane], ready or 0.0)
            self.check()
            run_start = time.perf_counter()
            with torch.inference_mode():
                run.pop()()
            now = time.perf_counter()
            work_seconds = max(now - run_start, seconds)
            self._end_times[lane] = start + work_seconds if seconds else now
            self.check(max(0.0, self._end_times[lane] - now))
        except BaseException as error:  # the future raises it again for those that wait
            self._fail(error)
            raise
        self.busy_seconds[lane] += work_seconds
        return self._end_times[lane]

    def _fail(self, error: BaseException) -> None:
        self._error = error if self._error is None else self._error
        self._failed.set()

    def check(self, seconds: float = 0.0) -> None:
        """Wait for so many seconds; raise the lanes' first error as soon as there is one."""
        if self._failed.wait(seconds) and self._error is not None:
            raise self._error

    def has_raised(self) -> bool:
        """Whether an error was raised outside of `wait` and `check`: slabs may be wrong."""
        return False

    def stop(self) -> None:
        """End the threads; queued and waiting work fails. The next work starts them again."""
        self._fail(RuntimeError("the lanes were stopped"))
        for thread in self._threads.values():
            thread.shutdown()
        self._threads.clear()
        self._failed.clear()
        self._error = None

    def close(self) -> None:
        """End the threads, and reset the counts for the next model."""
        self.stop()
        self._reset_busy_seconds(self.busy_seconds)
        self.in_use = False

    def _reset_busy_seconds(self, lanes: Iterable[str]) -> None:
        with torch.inference_mode(False):  # threads without that mode add to them
            zero = torch.zeros((), dtype=torch.float64, device="cpu")
            self.busy_seconds = {lane: zero.clone() for lane in lanes}


class ShapedDevice(Lanes):
    """A device of three threads, which work at most as fast as the given rates.

    Everything is in host memory. Memory of an accelerator and pinned memory are only counted.

    Args:
        link_bytes_per_s, host_bytes_per_s, accelerator_bytes_per_s: bytes of weights per second.
        call_seconds: from the end of one call of a split linear to the next, for predictions.

    Attributes:
        bytes, peak_bytes: the accelerator's memory in use, now and at most.
        pinned_bytes: pinned memory in use.
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

    def rates(self, dtype: torch.dtype, pin_memory: bool | str = True) -> Rates:
        return self._rates

    def _submit(self, lane: str, run: Run, nbytes: int, after: End | None = None) -> End:
        wait = None if after is None else after.result
        return self.submit(lane, run, self._seconds(lane, nbytes), wait)

    def _seconds(self, lane: str, nbytes: int) -> float:
        """Seconds that a lane's work takes at least."""
        rates = self._rates if self.pinned_bytes else self._rates.unpinned()
        return nbytes / getattr(rates, lane)

    def pinned(self, nbytes: int) -> Tensor:
        self.pinned_bytes += nbytes
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

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

    def compute_on_host(
        self, operation: Operation, weight: Tensor, x: Tensor, out: Tensor, nbytes: int
    ) -> End:
        return self._submit("host", partial(OPERATIONS[operation], weight, x, out), nbytes)

    def wait(self, events: Sequence[Any]) -> float:
        return max(event.result() for event in events)

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def close(self) -> None:
        super().close()
        self.bytes = self.pinned_bytes = 0
