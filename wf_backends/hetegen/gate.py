"""Where a thread and CUDA's streams meet: the stream waits for the thread, the caller for none."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor


class CudaGate:
    """A count in pinned memory that a thread raises, and for which streams wait.

    By cuStreamWaitValue32 of CUDA's driver, which compares modulo 2^32 and does not see who raises
    the count. So that the driver does not run one before the other, whoever holds a stream has it
    wait for the events, too, for which the thread waits. It has not run on a GPU.

    Args:
        word: (1,) int32 of pinned memory, for this gate alone.
        stream: waits once for an open gate, so that what is not supported is known at once.

    Raises:
        ImportError: without cuda-bindings, which come with torch for CUDA.
        AttributeError: for a torch before 2.11, whose streams do not tell their handle.
        RuntimeError: if the driver refuses.
    """

    def __init__(self, word: Tensor, stream: Any) -> None:
        from cuda.bindings import driver  # type: ignore[import-not-found]

        self._driver, self._word = driver, word  # the memory lives as long as the gate
        self._count = ctypes.c_uint32.from_address(word.data_ptr())
        self._count.value = 0
        self._address = self._checked(driver.cuMemHostGetDevicePointer(word.data_ptr(), 0))
        self.hold(stream, 0)

    def hold(self, stream: Any, count: int) -> None:
        """What is put on the stream from now on comes after `open(count)`. Returns at once."""
        at_least = self._driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        handle, value = int(stream.native_handle), count % 2**32
        self._checked(self._driver.cuStreamWaitValue32(handle, self._address, value, int(at_least)))

    def open(self, count: int) -> None:
        """Raise the count; counts only grow."""
        self._count.value = count % 2**32

    def _checked(self, returned: tuple) -> Any:
        """What a call of the driver returned beside its status."""
        status, *rest = returned
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"CUDA's driver has no gates here: {status}")
        return rest[0] if rest else None
