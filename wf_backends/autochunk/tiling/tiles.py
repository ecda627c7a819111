"""The modules that are called tile by tile in training: as plain data, and applied to a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from wf_backends._validation import positive
from wf_backends.autochunk.tiling.handle import Handle
from wf_backends.autochunk.tiling.original import Original
from wf_backends.autochunk.tiling.tiled_call import TiledCall
from wf_backends.autochunk.tiling.tiled_loss import HeadLoss, tile_loss


@dataclass(frozen=True, slots=True)
class Tiles:
    """How one module is called in training. Plain data.

    A tensor argument is cut if it has as many rows along `dim` as the first tensor argument that
    has this dimension; other arguments are passed whole. All results must have these rows.
    """

    module: str
    """Its name in `model.named_modules()`."""
    dim: int
    """Counted from the front: 1 in (batch, tokens, width)."""
    tiles: int
    """The largest number of tiles; a call with fewer rows has fewer."""
    loss: bool = False
    """The module is the head of a causal language model: each tile computes its logits and their
    cross entropy, so that all logits never exist at one time. See `tiled_loss`."""


def tile_modules(
    model: nn.Module, tiles: Sequence[Tiles], group: ProcessGroup | None = None
) -> Handle:
    """Have the modules that `tiles` names called tile by tile.

    Call it before DDP, FSDP2 or DeepSpeed wrap the model. With ZeRO 3, DeepSpeed must gather each
    tiled module that has children as a whole (`deepspeed.utils.set_z3_leaf_module(module, True)`);
    otherwise it would gather the children for every tile.

    Args:
        group: the ranks that train together; None: all of the job. A module that one rank tiles is
            tiled on all, in the largest number of tiles among the ranks.

    Raises:
        ValueError: for an unknown module, a wrong `dim` or `tiles`, or ranks that cut a module
            along different dimensions.
        NotImplementedError: for a loss that is not transformers' for causal language models.
    """
    return install(model, agreed(tiles, group))


def install(model: nn.Module, tiles: Sequence[Tiles]) -> Handle:
    """As `tile_modules`, on this process alone."""
    modules = dict(model.named_modules())
    for spec in tiles:
        positive("tiles", spec.tiles)
        if spec.module not in modules:
            raise ValueError(f"module {spec.module!r} is none of this {type(model).__name__}")
        if spec.dim < 0:
            raise ValueError(f"dim must be counted from the first, 0 or more, got {spec.dim}")
    handle = Handle()
    try:
        for spec in tiles:
            module = modules[spec.module]
            if spec.loss:
                tile_loss(modules[spec.module.rpartition(".")[0]], module, spec.tiles, handle)
            elif spec.tiles > 1:
                handle.set(module, "forward", TiledCall(Original(module), spec.dim, spec.tiles))
    except BaseException:
        handle.remove()
        raise
    handle.tiles = tuple(tiles)
    return handle


def agreed(tiles: Sequence[Tiles], group: ProcessGroup | None) -> tuple[Tiles, ...]:
    """All modules that any rank of `group` (None: of the job) tiles, each in its largest count."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return tuple(tiles)
    tiles_by_rank: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(tiles_by_rank, list(tiles), group)
    largest: dict[str, Tiles] = {}
    for spec in chain.from_iterable(tiles_by_rank):
        known = largest.setdefault(spec.module, spec)
        if (known.dim, known.loss) != (spec.dim, spec.loss):
            raise ValueError(f"all ranks must tile a module alike, got {known} and {spec}")
        if spec.tiles > known.tiles:
            largest[spec.module] = spec
    return tuple(largest.values())


def tiled_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that are called tile by tile."""
    return [m for m in model.modules() if isinstance(vars(m).get("forward"), TiledCall | HeadLoss)]


def modules_in_tiles(model: nn.Module) -> set[nn.Module]:
    """The modules inside tiled ones: they run once for each tile, on its rows."""
    tiled = tiled_modules(model)
    return {part for module in tiled for part in module.modules() if part is not module}
