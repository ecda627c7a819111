"""Pinned host memory for the weights that the link copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

BLOCK_BYTES = 2**30
ALIGNMENT = 64  # bytes, of a cache line


def pin_weights(
    parameters: Iterable[nn.Parameter], allocate: Callable[[int], Tensor], undo: ExitStack
) -> None:
    """Move parameters to pinned memory one by one, so that only one of them is twice in memory.

    torch rounds pinned memory up to a power of two. So they share blocks of BLOCK_BYTES, for which
    that costs nothing; only larger parameters are rounded.

    Args:
        allocate: nbytes -> pinned memory (nbytes,) uint8; MemoryError or torch's RuntimeError if
            none is left.
        undo: moves them back to memory that is not pinned.
    """
    free: list[Tensor] = []  # of each block, what no parameter uses yet

    def copy(tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        has_room = (i for i, memory in enumerate(free) if memory.nbytes >= tensor.nbytes)
        index = next(has_room, len(free))
        if index == len(free):
            free.append(allocate(max(tensor.nbytes, BLOCK_BYTES)))
        memory = free[index]
        free[index] = memory[-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT :]
        # A view of a block made elsewhere would be no inference tensor where the weight is one.
        place = memory.untyped_storage(), memory.storage_offset() // tensor.itemsize
        return tensor.new_empty(0).set_(*place, tensor.shape, tensor.stride()).copy_(tensor)

    for parameter in parameters:
        move(parameter, copy)
        undo.callback(move, parameter, Tensor.clone)


def move(tensor: Tensor, copy: Callable[[Tensor], Tensor]) -> None:
    """Have a parameter or buffer use the memory of a copy."""
    with torch.inference_mode(tensor.is_inference()):  # a mix has no version counter
        tensor.data = copy(tensor.data)
