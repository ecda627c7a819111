"""Which modules of a model are called tile by tile in training: plain data, and how it is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from wf_backends._validation import positive
from wf_backends.tiling.handle import Handle
from wf_backends.tiling.tiled_call import Original, TiledCall
from wf_backends.tiling.tiled_loss import tile_loss


@dataclass(frozen=True, slots=True)
class Tiles:
    """How one module is called in training. Plain data.

    Of its arguments and results, every tensor that has as many rows along `dim` as the first tensor
    argument is cut; the others are passed whole.
    """

    module: str
    """As `model.named_modules()` has it."""
    dim: int
    """Not negative: 1 in (batch, tokens, width)."""
    tiles: int
    """At most; fewer where a call has fewer rows."""
    loss: bool = False
    """The module is the head of a causal language model: its logits and the cross entropy of the
    call's labels are made together, and there are never all logits. See `tiled_loss`."""


def tile_modules(
    model: nn.Module, tiles: Sequence[Tiles], group: ProcessGroup | None = None
) -> Handle:
    """Have the modules of `model` that `tiles` names called tile by tile.

    Call it before DDP, FSDP2 or DeepSpeed wrap the model. At ZeRO 3 each of the modules that has
    children must be one that DeepSpeed gathers as a whole
    (`deepspeed.utils.set_z3_leaf_module(module, True)`), or its parts would be gathered by tile.

    Args:
        group: ranks that train together. None: all of the job. What one of them tiles all do, in
            the largest count among them.

    Raises:
        ValueError: for a module that there is not, a wrong `dim` or `tiles`, or ranks that cut a
            module along different dimensions.
        NotImplementedError: for a loss that is not transformers' for causal language models.
    """
    return install(model, agreed(tiles, group))


def install(model: nn.Module, tiles: Sequence[Tiles]) -> Handle:
    """As `tile_modules`, of this process alone."""
    modules = dict(model.named_modules())
    for one in tiles:
        positive("tiles", one.tiles)
        if one.module not in modules:
            raise ValueError(f"module {one.module!r} is none of this {type(model).__name__}")
        if one.dim < 0:
            raise ValueError(f"dim must be counted from the first, 0 or more, got {one.dim}")
    with Handle() as handle:  # an error takes back what was done so far
        for one in tiles:
            module = modules[one.module]
            if one.loss:
                tile_loss(modules[one.module.rpartition(".")[0]], module, one.tiles, handle)
            elif one.tiles > 1:
                handle.set(module, "forward", TiledCall(Original(module), one.dim, one.tiles))
        done = handle.pop_all()
    done.tiles = tuple(tiles)
    return done


def agreed(tiles: Sequence[Tiles], group: ProcessGroup | None = None) -> tuple[Tiles, ...]:
    """What any rank of `group` (None: of the job) tiles, in the largest count of all ranks.

    Raises:
        ValueError: if ranks cut a module along different dimensions.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return tuple(tiles)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, list(tiles), group)
    found: dict[str, Tiles] = {}
    for one in chain.from_iterable(everyone):
        known = found.setdefault(one.module, one)
        if (known.dim, known.loss) != (one.dim, one.loss):
            raise ValueError(f"all ranks must tile a module alike, got {known} and {one}")
        found[one.module] = max(known, one, key=lambda tiles: tiles.tiles)
    return tuple(found.values())
