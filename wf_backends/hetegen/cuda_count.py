"""Where threads and CUDA's streams meet: each waits for the other, and the caller for none."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor


class CudaCount:
    """A count in pinned memory. Either threads raise it and streams wait, or the other way round.

    By cuStreamWaitValue32 and cuStreamWriteValue32 of CUDA's driver, modulo 2^32. The driver does
    not see who raises a count. So that it does not run one before the other, whoever holds a stream
    has it wait for the events, too, for which the thread waits.

    A thread that waits reads the memory and asks the driver for nothing. While a stream is held the
    driver may be locked by a call that waits for it: the first launch of a kernel, memory given
    back, a full queue. If the thread that is to open the stream asked it for an event, both would
    wait for good (`benchmarks/launch_queue.py`).

    Args:
        word: (1,) int32 of pinned memory, for this count alone.
        stream: waits once for 0, so that what is not supported is known at once.

    Raises:
        ImportError: without cuda-bindings, which come with torch for CUDA.
        AttributeError: for a torch before 2.11, whose streams do not tell their handle.
        RuntimeError: if the driver refuses.
    """

    def __init__(self, word: Tensor, stream: Any) -> None:
        from cuda.bindings import driver  # type: ignore[import-not-found]

        self._driver, self._word = driver, word  # the memory lives as long as the count
        self._count = ctypes.c_uint32.from_address(word.data_ptr())
        self._count.value = 0
        self._address = self._checked(driver.cuMemHostGetDevicePointer(word.data_ptr(), 0))
        self.hold(stream, 0)

    def hold(self, stream: Any, count: int) -> None:
        """What is put on the stream from now on comes after the count. Returns at once."""
        at_least = self._driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        self._on(stream, self._driver.cuStreamWaitValue32, count, at_least)

    def raise_on(self, stream: Any, count: int) -> None:
        """Raise the count when what is on the stream is done. Returns at once."""
        plain = self._driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT
        self._on(stream, self._driver.cuStreamWriteValue32, count, plain)

    def raise_to(self, count: int) -> None:
        """Raise the count; counts only grow."""
        self._count.value = count % 2**32

    def reached(self, count: int) -> bool:
        return (self._count.value - count) % 2**32 < 2**31

    def _on(self, stream: Any, do: Any, count: int, flags: Any) -> None:
        self._checked(do(int(stream.native_handle), self._address, count % 2**32, int(flags)))

    def _checked(self, returned: tuple) -> Any:
        """What a call of the driver returned beside its status."""
        status, *rest = returned
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"CUDA's driver has no counts for streams here: {status}")
        return rest[0] if rest else None
