"""The hooks of one diffusers transformer: they cut its tokens over the ranks, and gather them.

Every token attends to every token, so a rank may have any tokens. The layout gives their number;
text and image are in the same proportion as in the whole sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from wf_backends import SequenceParallel
from wf_backends.runtime import gather_shards, move, positions, take_shard
from wf_backends.schedule import Layout, make_layout, size
from wf_diffusers.attention import Attention, take_over
from wf_diffusers.families import Cut, Family, find_modules
from wf_transformers import Handle
from wf_transformers.calls import by_name, parameter_names

Arguments = dict[str, Any]


class TransformerHooks:
    """The hooks of one model. `handle.remove()` removes them."""

    def __init__(self, model: nn.Module, family: Family, handle: Handle) -> None:
        self.family, self.handle, self.sp = family, handle, handle.sp
        self.attention = Attention(handle.sp)
        self._layout: Layout = ()
        modules = [module for path in family.attention for module in find_modules(model, path)]
        self._num_attention = len(modules)
        for module in modules:
            take_over(module, self.attention, handle)
        self._register(model)

    def _register(self, model: nn.Module) -> None:
        modules = ((m, cut) for cut in self.family.cuts for m in find_modules(model, cut.module))
        gathered = model.get_submodule(self.family.gathered)
        self.handle.hooks(
            model.register_forward_pre_hook(self._before_model, with_kwargs=True),
            *(self._register_cut(module, cut) for module, cut in modules),
            gathered.register_forward_hook(self._gather),
            model.register_forward_hook(self._check_calls),
        )

    def _before_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: Arguments) -> None:
        """Check the arguments of a call of the model: supported, and the same on every rank."""
        arguments = by_name(parameter_names(model), args, kwargs)
        self.attention.calls = 0
        if self.sp.size == 1:
            return
        _refuse(model, arguments, self.family.refused)
        with self.handle.advising():
            self.sp.check_same(arguments)

    def _register_cut(self, module: nn.Module, cut: Cut) -> Any:
        """Register a hook that cuts arguments of `module`; return the hook's torch handle."""
        names = parameter_names(module)

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: Arguments) -> Any:
            arguments = by_name(names, args, kwargs)
            if _get_argument(arguments, cut.streams[-1][0]) is None:
                return None
            layouts = [self._layout] if cut.reuses_layout else self._layouts(cut, arguments)
            for stream, layout in zip(cut.streams, layouts, strict=True):
                take = partial(take_rows, self.sp, layout, cut.dim)
                for path in set(stream) - {cut.kept}:
                    rows = tree_map_only(Tensor, take, _get_argument(arguments, path))
                    _set_argument(arguments, path, rows)
            self._layout = layouts[-1]
            return (), arguments

        return module.register_forward_pre_hook(hook, with_kwargs=True)

    def _layouts(self, cut: Cut, arguments: Arguments) -> list[Layout]:
        """Return the layout of each stream."""
        first = [tree_leaves(_get_argument(arguments, stream[0]))[0] for stream in cut.streams]
        lengths = [tensor.shape[cut.dim] for tensor in first]
        layouts = stream_layouts(self.sp, lengths)
        if not self.family.allows_empty_stream and any(() in layout for layout in layouts):
            raise ValueError(
                f"streams of {lengths} tokens are too short for {self.sp.size} ranks: a rank would "
                "have no tokens of a stream, which this model does not support; pad the text, or "
                "use fewer ranks"
            )
        return layouts

    def _gather(self, _: nn.Module, __: Any, rows: Tensor) -> Tensor:
        return gather_rows(self.sp, self._layout, 1, rows)

    def _check_calls(self, model: nn.Module, *_: Any) -> None:
        """Refuse a forward in which an attention module did not call our attention."""
        if self.attention.calls != self._num_attention:
            raise NotImplementedError(
                f"{self.attention.calls} of the {self._num_attention} attention modules of "
                f"{type(model).__name__} called WallFacer's attention: processors or backends were "
                "changed after wf_diffusers.attach, and every rank would attend to its own tokens "
                "only. Set them before, and attach again"
            )


def _get_argument(arguments: Arguments, path: str) -> Any:
    """Return an argument ("name"), or an item of an argument that is a tuple ("name.1")."""
    name, _, index = path.partition(".")
    return arguments[name][int(index)] if index else arguments.get(name)


def _set_argument(arguments: Arguments, path: str, value: Any) -> None:
    """Replace what `_get_argument` returns; an argument that is None stays as it is."""
    name, _, index = path.partition(".")
    if index:
        items = list(arguments[name])
        items[int(index)] = value
        arguments[name] = tuple(items)
    elif value is not None:
        arguments[name] = value


def _refuse(model: nn.Module, arguments: Arguments, refused: tuple[tuple[str, str], ...]) -> None:
    """Refuse a call of which a rank cannot compute its part.

    Args:
        refused: (name, description) of arguments that must be None.

    Raises:
        NotImplementedError: names the argument or setting.
    """
    name = type(model).__name__
    for key, description in refused:
        if arguments.get(key) is not None:
            raise NotImplementedError(f"{name} was called with {key}: {description}")
    timestep = arguments.get("timestep")
    if isinstance(timestep, Tensor) and timestep.dim() > 1:
        raise NotImplementedError(
            f"{name} was called with a timestep {tuple(timestep.shape)}: timesteps of tokens would "
            "have to be cut; give one timestep for each sample"
        )
    dropout_rates = (m.p for m in model.modules() if isinstance(m, nn.Dropout))
    if model.training and any(rate > 0 for rate in dropout_rates):
        raise NotImplementedError(
            f"{name} has dropout, and all ranks would drop the same elements, each of its own "
            "tokens: set it to 0, or call model.eval()"
        )


def stream_layouts(sp: SequenceParallel, lengths: Sequence[int]) -> list[Layout]:
    """Return the layout of each stream: the rows of every rank, counted inside the stream.

    Ranks 0 to r together get c tokens. With n1 tokens of text and n2 of an image, these are
    floor(c n1 / (n1 + n2)) tokens of text, and the rest are tokens of the image.

    Args:
        lengths: tokens of each stream; one stream or two.

    Raises:
        ValueError: if there are too few tokens, or the layout follows from documents.
    """
    total = sum(lengths)
    shard_sizes = map(size, make_layout(sp.config.layout, sp.size, total))
    stops = list(accumulate(shard_sizes, initial=0))
    first_stops = [stop * lengths[0] // total for stop in stops]
    second_stops = [stop - first for stop, first in zip(stops, first_stops, strict=True)]
    layouts = [_layout_between(first_stops), _layout_between(second_stops)]
    return layouts[: len(lengths)]


def _layout_between(bounds: Sequence[int]) -> Layout:
    """Return the layout in which rank r owns the rows from bounds[r] to bounds[r + 1]."""
    return tuple(((a, b),) if a < b else () for a, b in pairwise(bounds))


def take_rows(sp: SequenceParallel, layout: Layout, dim: int, x: Tensor) -> Tensor:
    """Return this rank's rows of the whole x. The gradient is zero in all other rows."""
    if not layout[sp.rank]:
        return x.narrow(dim, 0, 0)
    return x.index_select(dim, positions(layout[sp.rank], x.device))


def gather_rows(sp: SequenceParallel, layout: Layout, dim: int, x: Tensor) -> Tensor:
    """Return the rows of all ranks. The gradient of this rank's rows is multiplied by `sp.size`.

    Every rank makes the same loss. With this factor the mean over the ranks of a parameter's
    gradient is that of one device, whether the parameter is used before the cut, between the cut
    and the gathering, or after it.
    """

    def take_gradient(grad: Tensor, label: str) -> Tensor:
        return take_shard(sp.comm, layout, dim, grad, label) * sp.size

    return move(x, partial(gather_shards, sp.comm, layout, dim), take_gradient, "sample")
