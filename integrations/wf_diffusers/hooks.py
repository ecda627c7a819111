"""The hooks of one transformer of diffusers: its tokens go to the ranks, and come back.

Every token attends to every token, so that it does not matter which ones a rank has: it gets as
many as attention expects by the layout, and of text and image its share.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from wf_backends import SequenceParallel
from wf_backends.runtime import gather_shards, move, positions, take_shard
from wf_backends.schedule import Layout, Ranges, make_layout, size
from wf_diffusers.attention import Attention, take_over
from wf_diffusers.families import Cut, Family, find
from wf_transformers import Handle
from wf_transformers.calls import parameter_names

Words = dict[str, Any]


class TransformerHooks:
    """The hooks of one model, attached by `handle`; its `remove()` takes them off."""

    def __init__(self, model: nn.Module, family: Family, handle: Handle) -> None:
        self.family, self.handle, self.sp = family, handle, handle.sp
        self.attention = Attention(handle.sp)
        self._layout: Layout = ()
        modules = [module for path in family.attention for module in find(model, path)]
        self._expected = len(modules)
        for module in modules:
            take_over(module, self.attention, handle)
        self._hook(model)

    def _hook(self, model: nn.Module) -> None:
        cuts = ((m, cut) for cut in self.family.cuts for m in find(model, cut.module))
        self.handle.hooks(
            model.register_forward_pre_hook(self._enter, with_kwargs=True),
            *(self._cut(module, cut) for module, cut in cuts),
            model.get_submodule(self.family.last).register_forward_hook(self._gather),
            model.register_forward_hook(self._leave),
        )

    def _enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: Words) -> None:
        given = dict(zip(parameter_names(model), args, strict=False)) | kwargs
        self.attention.calls = 0
        if self.sp.size == 1:
            return
        _refuse(model, given, self.family.refused)
        with self.handle.advising():
            self.sp.check_same(given)

    def _cut(self, module: nn.Module, cut: Cut) -> Any:
        names = parameter_names(module)

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: Words) -> tuple[tuple[()], Words]:
            given = dict(zip(names, args, strict=False)) | kwargs
            layouts = [self._layout] if cut.follows else self._layouts(cut, given)
            for stream, layout in zip(cut.streams, layouts, strict=True):
                rows = partial(take, self.sp, layout, cut.dim)
                for path in stream:
                    _put(given, path, tree_map_only(Tensor, rows, _get(given, path)))
            self._layout = layouts[-1]
            return (), given

        return module.register_forward_pre_hook(hook, with_kwargs=True)

    def _layouts(self, cut: Cut, given: Words) -> list[Layout]:
        """Which rows of each stream the ranks get."""
        first = [tree_leaves(_get(given, stream[0]))[0] for stream in cut.streams]
        lengths = [x.shape[cut.dim] for x in first]
        layouts = cut_streams(self.sp, lengths)
        if not self.family.takes_none and not all(map(all, layouts)):
            raise ValueError(
                f"streams of {lengths} tokens leave one of {self.sp.size} ranks without any of "
                "one, which this model does not take: pad the text, or use fewer ranks"
            )
        return layouts

    def _gather(self, _: nn.Module, __: Any, rows: Tensor) -> Tensor:
        return whole(self.sp, self._layout, 1, rows)

    def _leave(self, model: nn.Module, *_: Any) -> None:
        if self.attention.calls != self._expected:
            raise NotImplementedError(
                f"{self.attention.calls} of the {self._expected} attention modules of "
                f"{type(model).__name__} asked us: processors or backends were changed after "
                "wf_diffusers.attach, which would leave every rank with its own tokens. Set them "
                "before, and attach again"
            )


def _get(given: Words, path: str) -> Any:
    """An argument, or one of a tuple: "name", "name.1"."""
    name, _, at = path.partition(".")
    return given[name][int(at)] if at else given.get(name)


def _put(given: Words, path: str, value: Any) -> None:
    """Replace what `_get` gives."""
    name, _, at = path.partition(".")
    if at:
        value = tuple(value if i == int(at) else x for i, x in enumerate(given[name]))
    if value is not None:
        given[name] = value


def _refuse(model: nn.Module, given: Words, refused: tuple[tuple[str, str], ...]) -> None:
    """Refuse a call that a rank cannot compute its part of.

    Raises:
        NotImplementedError: naming what.
    """
    name = type(model).__name__
    for key, what in refused:
        if given.get(key) is not None:
            raise NotImplementedError(f"{name} was called with {key}: {what}")
    timestep = given.get("timestep")
    if isinstance(timestep, Tensor) and timestep.dim() > 1:
        raise NotImplementedError(
            f"{name} was called with a timestep {tuple(timestep.shape)}: one for each token would "
            "have to be cut; give one for each sample"
        )
    drops = (m.p for m in model.modules() if isinstance(m, nn.Dropout))
    if model.training and any(p > 0 for p in drops):
        raise NotImplementedError(
            f"{name} has dropout, and ranks would drop the same elements of other tokens: set it "
            "to 0, or call model.eval()"
        )


def cut_streams(sp: SequenceParallel, lengths: Sequence[int]) -> list[Layout]:
    """For each stream the rows of every rank, counted inside the stream.

    Of n1 tokens of text and n2 of an image, the first c of both together are
    floor(c n1 / (n1 + n2)) of text and the rest of the image.

    Args:
        lengths: of one stream or two, in tokens.

    Raises:
        ValueError: if there are too few tokens, or the layout follows from documents.
    """
    total = sum(lengths)
    rows = map(size, make_layout(sp.config.layout, sp.size, total))
    ends = [(end * lengths[0] // total, end) for end in accumulate(rows, initial=0)]
    first = tuple(_range(a, b) for (a, _), (b, _) in pairwise(ends))
    second = tuple(_range(c - a, d - b) for (a, c), (b, d) in pairwise(ends))
    return [first, second][: len(lengths)]


def _range(start: int, stop: int) -> Ranges:
    return ((start, stop),) if start < stop else ()


def take(sp: SequenceParallel, layout: Layout, dim: int, x: Tensor) -> Tensor:
    """This rank's rows of a whole x. A gradient stays in its rows, between zeros."""
    mine = layout[sp.rank]
    index = positions(mine, x.device) if mine else torch.empty(0, dtype=torch.long, device=x.device)
    return x.index_select(dim, index)


def whole(sp: SequenceParallel, layout: Layout, dim: int, x: Tensor) -> Tensor:
    """All rows, on every rank. The gradient of this rank's rows counts `size` times.

    The mean over the ranks of the gradients of any parameter, before, between and after the cut, is
    then that of one device, where every rank makes the same loss.
    """

    def back(grad: Tensor, label: str) -> Tensor:
        return take_shard(sp.comm, layout, dim, grad, label) * sp.size

    return move(x, partial(gather_shards, sp.comm, layout, dim), back, "sample")
