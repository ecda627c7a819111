"""Streams, events, pinned memory, and flags in it, of the accelerator that torch finds."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

WAIT_UNTIL_REACHED = 0  # CU_STREAM_WAIT_VALUE_GEQ of CUDA's driver


class Streams:
    """Streams, events and pinned memory of torch's accelerator.

    Args:
        flags: whether streams and threads may wait for each other's flags, where CUDA has them.

    Attributes:
        flags: whether they do: streams write and wait for numbers in pinned memory.

    Raises:
        ValueError: if torch finds no accelerator.
    """

    def __init__(self, flags: bool = True) -> None:
        if not torch.accelerator.is_available():
            raise ValueError(
                "torch finds no accelerator here; to try HeteGen without one pass device="
                "ShapedDevice(link_bytes_per_s=..., host_bytes_per_s=..., "
                "accelerator_bytes_per_s=...), or --shaped 1,3,20 on the command line"
            )
        self.device = torch.accelerator.current_stream().device
        self.flags = flags and self._is_cuda and torch.version.hip is None

    @cached_property
    def _driver(self) -> ctypes.CDLL:
        return ctypes.CDLL("libcuda.so.1")

    @property
    def _is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def stream(self) -> torch.Stream:
        """A stream. On CUDA it is torch.cuda.Stream: before torch 2.11 torch.cuda.Event takes no
        other, and reads beyond the end of a torch.Stream."""
        return torch.cuda.Stream(self.device) if self._is_cuda else torch.Stream(self.device)

    def event(self, timed: bool = False) -> torch.Event:
        """An event. On CUDA it is torch.cuda.Event: waiting for it frees the core (torch.Event
        spins, blocking or not), and recording it releases Python's GIL."""
        if self._is_cuda:
            return torch.cuda.Event(enable_timing=timed, blocking=not timed)
        return torch.Event(self.device, enable_timing=timed, blocking=not timed)

    def current(self) -> torch.Stream:
        module = torch.cuda if self._is_cuda else torch.accelerator
        return module.current_stream(self.device)

    def set_flag(self, stream: torch.Stream, flag: Tensor, number: int) -> None:
        """The stream writes a number to a flag, (1,) int64 in pinned memory."""
        self._on_flag("cuStreamWriteValue64_v2", stream, flag, number, 0)

    def wait_for_flag(self, stream: torch.Stream, flag: Tensor, number: int) -> None:
        """The stream waits until a flag has the number, or one beyond it."""
        self._on_flag("cuStreamWaitValue64_v2", stream, flag, number, WAIT_UNTIL_REACHED)

    def _on_flag(self, name: str, stream: Any, flag: Tensor, number: int, mode: int) -> None:
        with torch.cuda.device(self.device):  # of stream 0
            error = getattr(self._driver, name)(
                ctypes.c_void_p(stream.cuda_stream),
                ctypes.c_uint64(flag.data_ptr()),
                ctypes.c_uint64(number),
                ctypes.c_uint32(mode),
            )
        if error:
            raise RuntimeError(f"{name} of CUDA's driver failed with error {error}")

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.is_pinned()

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def clock(self) -> float:
        """The time in seconds, when all work on the streams has ended."""
        self.synchronize()
        return time.perf_counter()

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True, device="cpu")

    def copy(self, stream: torch.Stream, source: Tensor, target: Tensor) -> None:
        """Put a copy on the stream."""
        with torch.cuda.stream(stream) if isinstance(stream, torch.cuda.Stream) else stream:
            target.copy_(source, non_blocking=True)
