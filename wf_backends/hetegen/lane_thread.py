"""A lane that is a thread: work in order, errors to whoever waits, and an end at any time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue

import torch

from wf_backends.hetegen.device import Work


class LaneStopped(RuntimeError):
    """The work was not done because its lane was stopped."""


class LaneThread:
    """Does work in a thread of its own, which starts at the first work.

    Its events are futures of the time at which the work ended.

    Args:
        name: of the lane.
        seconds: what a work takes at least.
    """

    def __init__(self, name: str, seconds: Callable[[Work], float] = lambda work: 0.0) -> None:
        self.busy_seconds = 0.0
        self.nbytes = 0
        self._name = name
        self._seconds = seconds
        self._due = 0.0  # the end of the last work
        self._queue: SimpleQueue = SimpleQueue()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def submit(self, work: Work, after: Sequence[Future[float]] = ()) -> Future[float]:
        if self._thread is None:
            self._stopped.clear()
            self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            self._thread.start()
        done: Future[float] = Future()
        self._queue.put((work, after, time.perf_counter(), done))
        return done

    def ask_to_stop(self) -> None:
        """What waits or is queued fails with LaneStopped."""
        self._stopped.set()
        self._queue.put(None)

    def join(self) -> None:
        """Wait for the end of a thread that was asked to stop."""
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        self._queue = SimpleQueue()

    def _loop(self) -> None:
        with torch.inference_mode():
            while (item := self._queue.get()) is not None:
                *words, done = item
                try:
                    done.set_result(self._do(*words))
                except BaseException as error:  # whoever waits for the event raises it
                    done.set_exception(error)

    def _do(self, work: Work, after: Sequence[Future[float]], submitted: float) -> float:
        """Do a work; when it ended, or was due to end if that is later than the rates say."""
        start = max([submitted, self._due, *(event.result() for event in after)])
        self._check()
        begun = time.perf_counter()
        work.run()
        now = time.perf_counter()
        took = max(now - begun, self._seconds(work))
        self._due = max(start + took, now)
        if self._due > now:
            self._stopped.wait(self._due - now)
            self._check()
        self.busy_seconds += took
        self.nbytes += work.nbytes
        return self._due

    def _check(self) -> None:
        if self._stopped.is_set():
            raise LaneStopped(f"the lane {self._name!r} was stopped")
