"""Pinned host memory for the weights that the link copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

BLOCK_BYTES = 2**30
ALIGNMENT = 64  # bytes, of a cache line


class PinnedBlocks:
    """Pinned memory in blocks, each of which has many tensors.

    torch rounds pinned memory up to a power of two. In blocks of BLOCK_BYTES that costs nothing;
    only larger tensors are rounded.

    Args:
        allocate: nbytes -> pinned memory (nbytes,) uint8.
    """

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._blocks: list[Tensor] = []
        self._used: list[int] = []  # bytes of each block, from its start

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy in pinned memory."""
        tensor = tensor.contiguous()
        index = self._with_room(tensor.nbytes)
        start = self._used[index]
        self._used[index] += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        memory = self._blocks[index].untyped_storage()
        # A view of a block made elsewhere would be no inference tensor where the weight is one.
        offset = start // tensor.itemsize
        view = tensor.new_empty(0).set_(memory, offset, tensor.shape, tensor.stride())
        return view.copy_(tensor)

    def _with_room(self, nbytes: int) -> int:
        """The first block with room for so many bytes."""
        for index, block in enumerate(self._blocks):
            if block.nbytes - self._used[index] >= nbytes:
                return index
        self._blocks.append(self._allocate(max(nbytes, BLOCK_BYTES)))
        self._used.append(0)
        return len(self._blocks) - 1


def pin_weights(
    parameters: Iterable[nn.Parameter], allocate: Callable[[int], Tensor], undo: ExitStack
) -> None:
    """Move parameters to pinned memory one by one, so that only one of them is twice in memory.

    Args:
        allocate: nbytes -> pinned memory (nbytes,) uint8; MemoryError or torch's RuntimeError if
            none is left.
        undo: moves them back to memory that is not pinned.
    """
    blocks = PinnedBlocks(allocate)
    for parameter in parameters:
        move(parameter, blocks.copy)
        undo.callback(move, parameter, Tensor.clone)


def move(tensor: Tensor, copy: Callable[[Tensor], Tensor]) -> None:
    """Have a parameter or buffer use the memory of a copy."""
    with torch.inference_mode(tensor.is_inference()):  # a mix has no version counter
        tensor.data = copy(tensor.data)
