"""Pinned memory for activations, which is used again and not freed while streams run.

torch's own asks the driver for an event where a tensor ends that a copy used. If it ended in a
lane's thread, that thread would wait for a driver that may wait for the thread (`cuda_count.py`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class PinnedPool:
    """Memory by size, in powers of two, each piece with the event after which it is free.

    Args:
        pinned: (shape, type) -> a tensor; RuntimeError if no more can be pinned.
    """

    def __init__(self, pinned: Callable[[Sequence[int], torch.dtype], Tensor]) -> None:
        self._pinned = pinned
        self._all: list[Tensor] = []
        self._given: defaultdict[int, deque[tuple[Any, Tensor]]] = defaultdict(deque)

    def take(self, like: Tensor) -> Tensor:
        """Memory for a tensor like it, which must not be empty."""
        size = 1 << (like.nbytes - 1).bit_length()
        given = self._given[size]
        if given and given[0][0].query():
            memory = given.popleft()[1]
        else:
            memory = self._pinned((size,), torch.uint8)
            self._all.append(memory)
        return memory[: like.nbytes].view(like.dtype).view(like.shape)

    def give(self, taken: Tensor, after: Any) -> None:
        """Take back what `take` gave; it is free after the event."""
        whole = torch.empty(0, dtype=torch.uint8).set_(taken.untyped_storage())
        self._given[whole.nbytes].append((after, whole))

    def clear(self) -> None:
        """Free all. No stream uses any."""
        self._all.clear()
        self._given.clear()
