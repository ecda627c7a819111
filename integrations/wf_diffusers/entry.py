"""What a user calls: `attach` for a transformer of diffusers."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from wf_backends import SequenceParallel
from wf_backends.schedule import Layout
from wf_diffusers.attention import Attention, take_over
from wf_diffusers.families import Cut, Family, family_of, find
from wf_diffusers.streams import cut_streams, take, whole
from wf_transformers import Handle
from wf_transformers.calls import parameter_names

Words = dict[str, Any]


def attach(model: nn.Module, sp: SequenceParallel) -> Handle:
    """Let a transformer of diffusers attend over the ranks of `sp`.

    The model is called with whole inputs, the same on every rank of a sequence, and gives the whole
    sample on every rank. Its tokens are cut where they enter, rotary embeddings with them, and
    brought together before the sample is made of them. Gradients of all parameters are to be
    averaged over the ranks, as data parallelism does, of a loss that every rank makes alike.

    Args:
        model: a model of `wf_diffusers.families`, with any attention backend.

    Raises:
        NotImplementedError: for another model. When called, for what cannot be cut: a ControlNet's
            residuals, an IP-Adapter, a timestep for each token, masks, dropout in training.
        ValueError: when called, if the ranks were not given the same inputs.
    """
    family, handle = family_of(model), Handle(sp)
    handle.advice = f"all {sp.size} ranks of a sequence draw the same noise and read the same data"
    with handle.removed_on_error():
        _Spread(model, family, handle)
    return handle


class _Spread:
    """The hooks of one model."""

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
