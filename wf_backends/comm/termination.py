"""A launcher that ends a job sends SIGTERM first: the moment to say where this rank was.

Open MPI's mpirun sends it a quarter of a second after a rank was killed, and SIGKILL soon after it;
torchrun sends it at once, and SIGKILL 30 s later.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Termination:
    """Whether this process was told to end."""

    told = False

    def __call__(self, *_: object) -> None:
        self.told = True


@contextmanager
def noticed_termination() -> Iterator[Termination]:
    """SIGTERM meanwhile is noticed, and ends the process at the end of the block.

    Only in the main thread, and only where SIGTERM means what it does by default: a program that
    handles it itself keeps it. Blocks inside each other share what they notice.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not signal.SIG_DFL or threading.current_thread() is not threading.main_thread():
        yield handler if isinstance(handler, Termination) else Termination()
        return
    noticed = Termination()
    signal.signal(signal.SIGTERM, noticed)
    try:
        yield noticed
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if noticed.told:
            os.kill(os.getpid(), signal.SIGTERM)
