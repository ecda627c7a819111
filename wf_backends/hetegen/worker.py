"""The worker threads of lanes on CUDA: they need no GIL, so that streams may wait for them."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from wf_backends.hetegen.streams import Streams

CACHE_LINE = 8  # int64
CHECK_SECONDS = 5.0
SOURCE = Path(__file__).with_name("worker.cpp")


class Worker:
    """A thread that does numbered tasks in their order. Streams and it wait for each other's flags.

    Args:
        streams: of the accelerator.
        busy_seconds: (), float64; the time of each task is added to it.

    Attributes:
        thread: of worker.cpp, whose methods submit tasks and return their numbers.

    Raises:
        Exception: if the thread cannot be built, no memory is pinned, or flags do not work.
    """

    def __init__(self, streams: Streams, busy_seconds: Tensor) -> None:
        self._streams = streams
        flags = streams.pinned((2, CACHE_LINE), torch.int64).zero_()
        self._ready, self._done = flags[0, :1], flags[1, :1]
        self.thread = _extension().Worker(self._ready, self._done, busy_seconds, raise_in_thread)
        self.close = weakref.finalize(self, self.thread.close)  # at exit, too
        self._check_flags()

    def start_after(self, stream: Any, number: int) -> None:
        """Tasks that wait for `number` begin when the stream has done its work so far."""
        self._streams.set_flag(stream, self._ready, number)

    def finish_before(self, stream: Any, number: int) -> None:
        """The stream's next work begins when the task has ended."""
        self._streams.wait_for_flag(stream, self._done, number)

    def _check_flags(self) -> None:
        """Have a stream and the thread wait for each other once; a driver may not have that."""
        stream, passed = self._streams.stream(), self._streams.event()
        ones = torch.ones(1, 1, device="cpu")
        task = self.thread.multiply(ones, ones, torch.empty_like(ones))
        self.start_after(stream, task)
        self.finish_before(stream, task)
        passed.record(stream)
        end = time.perf_counter() + CHECK_SECONDS
        while not passed.query():
            if time.perf_counter() > end:
                self.close()  # the stream passes
                raise RuntimeError("a stream and a thread did not see each other's flags")


def make_workers(streams: Streams, busy_seconds: Mapping[str, Tensor]) -> dict[str, Worker]:
    """A worker for each lane; none for streams without flags.

    Where workers do not work a warning says so, and the streams are without flags from then on.
    """
    if not streams.flags:
        return {}
    try:
        return {lane: Worker(streams, seconds) for lane, seconds in busy_seconds.items()}
    except (RuntimeError, OSError, ImportError, CalledProcessError) as error:
        streams.flags = False
        warnings.warn(
            "the lanes have threads of Python, for which calls of split linears wait: those of C++ "
            f"do not work here. torch builds them with a C++ compiler and ninja (pip install "
            f"ninja): {error}",
            stacklevel=2,
        )
        return {}


def raise_in_thread(ident: int, message: str) -> bool:
    """Raise a RuntimeError in a thread between two bytecodes, as Ctrl-C is in the main one.

    Not in a pool's thread that has no task: the error would end it.

    Args:
        ident: of the thread, as `threading.get_ident()`.

    Returns:
        Whether the thread raises it.
    """
    if ident != threading.main_thread().ident:
        top = sys._current_frames().get(ident)
        frames = traceback.walk_stack(top) if top else ()
        modules = {frame.f_globals.get("__name__", "") for frame, _ in frames}
        if {name.partition(".")[0] for name in modules} <= sys.stdlib_module_names:
            return False

    class Error(RuntimeError):
        def __new__(cls) -> RuntimeError:  # Python takes a class, and calls it in the thread
            return RuntimeError(message)

    set_error = ctypes.pythonapi.PyThreadState_SetAsyncExc
    return set_error(ctypes.c_ulong(ident), ctypes.py_object(Error)) == 1


def _extension() -> Any:
    """worker.cpp, built by torch into its folder of extensions when this torch first uses it.

    Each installation of torch has its own build, though they share the folder.
    """
    from torch.utils.cpp_extension import load

    installation = crc32(f"{torch.__version__} {torch.__file__}".encode())
    return load(f"wallfacer_hetegen_{installation:08x}", [str(SOURCE)], extra_cflags=["-O2"])
