"""A lane that is a thread: work in order, errors to whoever waits, and an end at any time."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import torch

from wf_backends.hetegen.device import LaneStopped, Work


class ThreadEvent:
    """Done, or failed, at the time `due` of the device's clock."""

    def __init__(self) -> None:
        self.due = 0.0
        self._done = threading.Event()
        self._error: BaseException | None = None

    def finish(self, due: float) -> None:
        self.due = due
        self._done.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._done.set()

    def wait(self) -> None:
        """Until it is done; raises what made it fail."""
        self._done.wait()
        if self._error is not None:
            raise self._error


class LaneThread:
    """Does work in a thread of its own, which starts at the first work.

    Args:
        name: of the lane.
        seconds: what a work takes at least; nothing for None.
    """

    def __init__(self, name: str, seconds: Callable[[Work], float] | None = None) -> None:
        self.busy_seconds = 0.0
        self.nbytes = 0
        self._name = name
        self._seconds = seconds
        self._due = 0.0  # the end of the last work, by the device's clock
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def submit(self, work: Work, after: Sequence[ThreadEvent] = ()) -> ThreadEvent:
        if self._thread is None:
            self._stopped.clear()
            self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            self._thread.start()
        event = ThreadEvent()
        self._queue.put((work, tuple(after), time.perf_counter(), event))
        return event

    def ask_to_stop(self) -> None:
        """What waits or is queued fails with LaneStopped."""
        self._stopped.set()
        self._queue.put(None)

    def join(self) -> None:
        """Wait for the end of a thread that was asked to stop."""
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        self._queue = queue.SimpleQueue()

    def _loop(self) -> None:
        with torch.inference_mode():
            while (item := self._queue.get()) is not None:
                *words, event = item
                try:
                    event.finish(self._do(*words))
                except BaseException as error:  # whoever waits for the event raises it
                    event.fail(error)

    def _do(self, work: Work, after: tuple[ThreadEvent, ...], submitted: float) -> float:
        """Do a work; its end by the device's clock."""
        for event in after:
            event.wait()
        if self._stopped.is_set():
            raise LaneStopped(f"the lane {self._name!r} was stopped")
        begun = time.perf_counter()
        work.run()
        now = time.perf_counter()
        start = max([submitted, self._due, *(event.due for event in after)])
        took = now - begun
        if self._seconds is not None:
            took = max(took, self._seconds(work))
            if start + took > now and self._stopped.wait(start + took - now):
                raise LaneStopped(f"the lane {self._name!r} was stopped")
        self._due = max(start + took, now)
        self.busy_seconds += took
        self.nbytes += work.nbytes
        return self._due
