"""A lane that is a thread: work in order, errors to whoever waits, and an end at any time."""

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


class LaneStopped(RuntimeError):
    """The work was not done because the lanes were stopped."""


class Stop:
    """Tells the threads of a device to end, at the first error of any of them.

    Attributes:
        error: the first one.
    """

    def __init__(self) -> None:
        self._set = threading.Event()
        self.error: BaseException | None = None

    def check(self) -> None:
        """Raise the first error, if there was one."""
        if self.error is not None:
            raise self.error

    def set(self, error: BaseException) -> BaseException:
        """Fail all work from now on; the error that was the first."""
        if self.error is None:
            self.error = error
        self._set.set()
        return self.error

    def wait(self, seconds: float) -> None:
        """Return after so many seconds; raise as soon as the threads are to end."""
        if self._set.wait(seconds):
            raise LaneStopped("the lanes were stopped") from self.error

    def clear(self) -> None:
        self._set.clear()
        self.error = None


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
        self._thread: ThreadPoolExecutor | None = None

    def submit(
        self, run: Run, seconds: float = 0.0, after: Callable[[], Any] | None = None
    ) -> Future[float]:
        """Have it run, for so many seconds at least; the time at which it ends.

        Args:
            after: waits for what the work needs; with a rate it tells when that was there.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, self._name)
        return self._thread.submit(self._do, [run], seconds, after, time.perf_counter())

    def end(self) -> None:
        """Wait for the end of the thread, which does what is queued first."""
        if self._thread is not None:
            self._thread.shutdown()
        self._thread = None

    def _do(
        self, run: list[Run], seconds: float, after: Callable[[], Any] | None, submitted: float
    ) -> float:
        """When it ended; with a rate when it was due to, whose thread may have woken late.

        The list is emptied: a work's tensors go before anybody knows that it ended.
        """
        try:
            due = after() if after is not None else None
            start = max(submitted, self._due, due or 0.0)
            self._stop.wait(0)
            begun = time.perf_counter()
            with torch.inference_mode():
                run.pop()()
            now = time.perf_counter()
            took = max(now - begun, seconds)
            self._due = start + took if seconds else now
            self._stop.wait(max(0.0, self._due - now))
        except BaseException as error:  # whoever waits for it raises it
            raise self._stop.set(error) from None
        self.busy_seconds += took
        return self._due


class Lanes:
    """The lanes of a device (`device.py`).

    Attributes:
        lanes: those of `jobs.LANE_NAMES` that are threads.
    """

    def __init__(self) -> None:
        self.lanes: dict[str, LaneThread] = {}
        self._stop = Stop()

    def stop(self) -> None:
        """End the threads: what is queued or waits fails. The next work starts them again."""
        self._stop.set(LaneStopped("the lanes were stopped"))
        for lane in self.lanes.values():
            lane.end()
        self._stop.clear()
