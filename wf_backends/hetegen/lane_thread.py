"""Lanes that are threads: work in order, errors to whoever waits, and an end at any time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

Run = Callable[[], object]
Write = Callable[[Tensor, Tensor], object]  # of an input, fills an output


class Stop:
    """Ends what the threads of a device do, at the first error of any of them."""

    def __init__(self) -> None:
        self._set = threading.Event()
        self._error: BaseException | None = None

    def set(self, error: BaseException) -> None:
        """Fail all work from now on: with this error, if it is the first."""
        self._error = error if self._error is None else self._error
        self._set.set()

    def wait(self, seconds: float = 0.0) -> None:
        """Return after so many seconds; raise the first error as soon as there is one."""
        if self._set.wait(seconds) and self._error is not None:
            raise self._error

    def clear(self) -> None:
        self._set.clear()
        self._error = None


class LaneThread:
    """Does one work after the other in a thread of its own, which starts at the first work.

    Args:
        stop: shared by the lanes of a device. An error of one is that of all their work to come.

    Attributes:
        busy_seconds: what its works took so far.
    """

    def __init__(self, name: str, stop: Stop) -> None:
        self.busy_seconds = 0.0
        self._name, self._stop = name, stop
        self._due = 0.0  # the end of the last work
        self._thread = ThreadPoolExecutor(1, name)

    def submit(
        self, run: Run, seconds: float = 0.0, after: Callable[[], Any] | None = None
    ) -> Future[float]:
        """Have it run, for so many seconds at least; the time at which it ends.

        Args:
            after: waits for what the work needs; with a rate it tells when that was there.
        """
        return self._thread.submit(self._do, [run], seconds, after, time.perf_counter())

    def end(self) -> None:
        """Wait for the end of the thread, which does what is queued first."""
        self._thread.shutdown()
        self._thread = ThreadPoolExecutor(1, self._name)

    def _do(
        self, run: list[Run], seconds: float, after: Callable[[], Any] | None, submitted: float
    ) -> float:
        """When it ended; with a rate when it was due to, whose thread may have woken late.

        The list is emptied: a work's tensors go before anybody knows that it ended.
        """
        try:
            due = after() if after is not None else None
            start = max(submitted, self._due, due or 0.0)
            self._stop.wait()
            begun = time.perf_counter()
            with torch.inference_mode():
                run.pop()()
            now = time.perf_counter()
            took = max(now - begun, seconds)
            self._due = start + took if seconds else now
            self._stop.wait(max(0.0, self._due - now))
        except BaseException as error:  # whoever waits for it raises it
            self._stop.set(error)
            raise
        self.busy_seconds += took
        return self._due


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
        pinned(nbytes)                   pinned memory, (nbytes,) uint8; MemoryError if none is left
        place(tensor)                    a copy in the accelerator's memory

    `copy`, `compute` and `on_host` return at once, with an event: the end of their work. What that
    raises, `wait` raises. `after` is the event of the work before it on its slab, None for none.

    Args:
        threads: the lanes that are threads.

    Attributes:
        lanes: these, by name.
        in_use: whether a model is split over it.
    """

    def __init__(self, *threads: str) -> None:
        self._stop, self.in_use = Stop(), False
        self.lanes = {name: LaneThread(name, self._stop) for name in threads}

    def stop(self) -> None:
        """End the threads: what is queued or waits fails. The next work starts them again."""
        self._stop.set(RuntimeError("the lanes were stopped"))
        for lane in self.lanes.values():
            lane.end()
        self._stop.clear()

    def close(self) -> None:
        """End the threads, and count anew for the next model."""
        self.stop()
        self.lanes = {name: LaneThread(name, self._stop) for name in self.lanes}
        self.in_use = False
