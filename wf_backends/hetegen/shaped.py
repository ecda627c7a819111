"""Devices without an accelerator: real tensors, and threads as lanes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import torch
from torch import Tensor

from wf_backends.hetegen.device import Work
from wf_backends.hetegen.lane_thread import LaneThread, ThreadEvent
from wf_backends.hetegen.law import Rates

THREAD_CALL_SECONDS = 2e-4  # to hand work to a thread and wait for it, on a core that is shared


class ThreadDevice:
    """Lanes that are threads and work as fast as they can. Everything is in host memory.

    What an accelerator would hold is counted, and what would be pinned.

    Args:
        rates: those that a plan goes by.
        pageable_link: bytes a second of copies from memory that is not pinned.
        pinned_limit_bytes: how much memory can be pinned.
        one_thread: whether the accelerator's work is done in the link's thread.

    Attributes:
        bytes, peak_bytes: of the accelerator's memory: now, and at most.
        pinned_bytes: of pinned memory.
    """

    def __init__(
        self,
        rates: Rates,
        *,
        pageable_link: float | None = None,
        pinned_limit_bytes: float = inf,
        one_thread: bool = False,
    ) -> None:
        self._rates = rates
        self._pageable = pageable_link or rates.link
        self._pinned_limit = pinned_limit_bytes
        self.bytes = self.peak_bytes = self.pinned_bytes = 0
        self.link = LaneThread("link", self._least("link"))
        self.host = LaneThread("host", self._least("host"))
        self.accelerator = (
            self.link if one_thread else LaneThread("accelerator", self._least("accelerator"))
        )

    def _least(self, lane: str) -> Callable[[Work], float] | None:
        """What a work of a lane takes at least; None for nothing."""
        return None

    def rates(self) -> Rates:
        return self._rates

    def pageable_link(self) -> float:
        return self._pageable

    def pinned(self, nbytes: int) -> Tensor:
        if self.pinned_bytes + nbytes > self._pinned_limit:
            raise MemoryError(f"{nbytes} bytes beyond {self.pinned_bytes} cannot be pinned")
        self.pinned_bytes += nbytes
        return torch.empty(nbytes, dtype=torch.uint8)

    def slab(self, nbytes: int) -> Tensor:
        self._count(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    def resident(self, rows: Tensor) -> Tensor:
        self._count(rows.nbytes)
        return rows.detach().clone(memory_format=torch.contiguous_format)

    def place(self, tensor: Tensor) -> Tensor:
        self._count(tensor.nbytes)
        return tensor

    def _count(self, nbytes: int) -> None:
        self.bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def copy(self, source: Tensor, pinned: Tensor | None, slab: Tensor) -> None:
        if pinned is not None:
            pinned.copy_(source)
            source = pinned
        slab.copy_(source)

    def to_host(self, x: Tensor) -> tuple[Tensor, Sequence[ThreadEvent]]:
        return x, ()

    def from_host(self, y: Tensor, out: Tensor) -> None:
        out.copy_(y)

    def wait(self, events: Sequence[ThreadEvent]) -> None:
        for event in events:
            event.wait()

    def stop(self) -> None:
        lanes = self.link, self.accelerator, self.host
        for lane in lanes:
            lane.ask_to_stop()
        for lane in lanes:
            lane.join()

    def close(self) -> None:
        self.stop()
        self.bytes = self.pinned_bytes = 0


class ShapedDevice(ThreadDevice):
    """Lanes whose work takes no less than its bytes, or its operations, take at a given rate.

    Args:
        link_bytes_per_s, host_bytes_per_s, accelerator_bytes_per_s: weight bytes a second.
        host_flops, accelerator_flops: operations a second, which bound work on many tokens.
        pageable_link_bytes_per_s: of copies from memory that is not pinned; half the link's if
            not given.
        pinned_limit_bytes: how much memory can be pinned.
        call_seconds: what a call of a split linear takes beside its GEMMs and copies.
    """

    def __init__(
        self,
        link_bytes_per_s: float,
        host_bytes_per_s: float,
        accelerator_bytes_per_s: float,
        *,
        host_flops: float = inf,
        accelerator_flops: float = inf,
        pageable_link_bytes_per_s: float | None = None,
        pinned_limit_bytes: float = inf,
        call_seconds: float = THREAD_CALL_SECONDS,
    ) -> None:
        rates = Rates(
            link_bytes_per_s,
            host_bytes_per_s,
            accelerator_bytes_per_s,
            host_flops=host_flops,
            accelerator_flops=accelerator_flops,
            call_seconds=call_seconds,
        )
        super().__init__(
            rates,
            pageable_link=pageable_link_bytes_per_s or link_bytes_per_s / 2,
            pinned_limit_bytes=pinned_limit_bytes,
        )

    def _least(self, lane: str) -> Callable[[Work], float]:
        rates = self._rates

        def link(work: Work) -> float:
            return work.nbytes / (rates.link if self.pinned_bytes else self._pageable)

        def host(work: Work) -> float:
            return max(work.nbytes / rates.host, work.operations / rates.host_flops)

        def accelerator(work: Work) -> float:
            return max(work.nbytes / rates.accelerator, work.operations / rates.accelerator_flops)

        return {"link": link, "host": host, "accelerator": accelerator}[lane]
