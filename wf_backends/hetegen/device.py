"""What the runner asks of a device; and a device of threads, without an accelerator."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wf_backends.weights import LANE_NAMES, Rates

THREAD_CALL_SECONDS = 2e-4  # to hand work to a thread and wait for it, on a core that is shared
End = Future[float]
Run = Callable[[], object]
Write = Callable[[Tensor, Tensor], object]  # of an input, fills an output


class Lanes:
    """What the runner asks of a device: three lanes, memory, and tensors on either side.

        copy(rows, pinned, slab, after)  on the link: rows of a weight into a slab, through pinned
                                         memory if it is not None
        compute(run, nbytes, after)      on the accelerator: run(), which reads so much of a weight
        on_host(write, x, out, nbytes)   on the host: write(x, out), of x and out on the accelerator
        wait(events)                     what the caller does next comes after these; when they were
                                         due
        now()                            the moment after what the caller has done so far
        seconds(start, end)              between two moments; waits for them
        rates(dtype)                     of its lanes, for one token and weights of a type
        pinned(nbytes)                   pinned memory, (nbytes,) uint8; a MemoryError or torch's
                                         RuntimeError if none is left
        place(tensor)                    a copy in the accelerator's memory

    `copy`, `compute` and `on_host` return at once, with an event: the end of their work. What that
    raises, `wait` raises. `after` is the event of the work before it on its slab, None for none.

    Args:
        threads: the lanes that are threads. They start at their first work.

    Attributes:
        busy_seconds: what the works of each thread took so far.
        in_use: whether a model is split over it.
    """

    def __init__(self, *threads: str) -> None:
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self.busy_seconds = dict.fromkeys(threads, 0.0)
        self._due = dict.fromkeys(threads, 0.0)  # the end of the last work
        self._failed = threading.Event()
        self._error: BaseException | None = None  # the first, which is that of all work to come
        self.in_use = False

    def submit(
        self, lane: str, run: Run, seconds: float = 0.0, after: Callable[[], Any] | None = None
    ) -> Future[float]:
        """Have a thread run this for so many seconds at least; the time at which it ends.

        Args:
            after: waits for what the work needs; with a rate it tells when that was there.
        """
        if lane not in self._threads:
            self._threads[lane] = ThreadPoolExecutor(1, lane)
        now = time.perf_counter()
        return self._threads[lane].submit(self._do, lane, [run], seconds, after, now)

    def _do(
        self,
        lane: str,
        run: list[Run],
        seconds: float,
        after: Callable[[], Any] | None,
        submitted: float,
    ) -> float:
        """When it ended; with a rate when it was due to, whose thread may have woken late.

        The list is emptied: a work's tensors go before anybody knows that it ended.
        """
        try:
            due = after() if after is not None else None
            start = max(submitted, self._due[lane], due or 0.0)
            self.check()
            begun = time.perf_counter()
            with torch.inference_mode():
                run.pop()()
            now = time.perf_counter()
            took = max(now - begun, seconds)
            self._due[lane] = start + took if seconds else now
            self.check(max(0.0, self._due[lane] - now))
        except BaseException as error:  # whoever waits for it raises it
            self._fail(error)
            raise
        self.busy_seconds[lane] += took
        return self._due[lane]

    def _fail(self, error: BaseException) -> None:
        self._error = error if self._error is None else self._error
        self._failed.set()

    def check(self, seconds: float = 0.0) -> None:
        """Return after so many seconds; raise the first error as soon as there is one."""
        if self._failed.wait(seconds) and self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End the threads: what is queued or waits fails. The next work starts them again."""
        self._fail(RuntimeError("the lanes were stopped"))
        for thread in self._threads.values():
            thread.shutdown()
        self._threads.clear()
        self._failed.clear()
        self._error = None

    def close(self) -> None:
        """End the threads, and count anew for the next model."""
        self.stop()
        self.busy_seconds = dict.fromkeys(self.busy_seconds, 0.0)
        self.in_use = False


class ShapedDevice(Lanes):
    """Lanes whose work takes no less than its bytes take at a given rate.

    Everything is in host memory. What an accelerator would hold is counted, and what is pinned.

    Args:
        link_bytes_per_s, host_bytes_per_s, accelerator_bytes_per_s: weight bytes a second.
        call_seconds: from the end of one call of a split linear to the next, for predictions.

    Attributes:
        bytes, peak_bytes: of the accelerator's memory: now, and at most.
        pinned_bytes: of pinned memory.
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

    def rates(self, dtype: torch.dtype) -> Rates:
        return self._rates

    def _submit(self, lane: str, run: Run, nbytes: int, after: End | None = None) -> End:
        return self.submit(lane, run, self._seconds(lane, nbytes), after and after.result)

    def _seconds(self, lane: str, nbytes: int) -> float:
        """What a work of a lane takes at least."""
        rates = self._rates if self.pinned_bytes else self._rates.unpinned()
        return nbytes / getattr(rates, lane)

    def pinned(self, nbytes: int) -> Tensor:
        self.pinned_bytes += nbytes
        return torch.empty(nbytes, dtype=torch.uint8)

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

    def on_host(self, write: Write, x: Tensor, out: Tensor, nbytes: int) -> End:
        return self._submit("host", partial(write, x, out), nbytes)

    def wait(self, events: Sequence[Any]) -> float:
        return max(event.result() for event in events)

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def close(self) -> None:
        super().close()
        self.bytes = self.pinned_bytes = 0
