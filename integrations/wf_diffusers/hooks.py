"""The hooks of one diffusers transformer: they cut its tokens over the ranks, and gather them.

Every token attends to every token, so a rank may have any tokens. The layout gives their number;
text and image are in the same proportion as in the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map_only

from wf_backends import SequenceParallel
from wf_backends._compile import eager
from wf_backends.comm import sum_on_all_ranks
from wf_backends.runtime import gather_shards, linear_map, positions, take_shard
from wf_backends.schedule import Layout, make_layout, size
from wf_diffusers.attention import TorchAttention, take_over
from wf_diffusers.cuts import Cut, Family, find_modules
from wf_diffusers.refused import refuse_cache, refuse_call
from wf_diffusers.samples import (
    join,
    leave_out_unused,
    lengths_differ,
    samples_of,
    take_off_padding,
)
from wf_transformers import Handle
from wf_transformers.calls import Kwargs, by_name, parameter_names

Hook = Callable[[nn.Module, Any, Tensor], Tensor]


class TransformerHooks:
    """The hooks of one model. `handle.remove()` removes them."""

    def __init__(self, model: nn.Module, family: Family, handle: Handle) -> None:
        self.family, self.handle, self.sp = family, handle, handle.sp
        self.attention = TorchAttention(handle.sp, family.masks_are_true)
        self._layout: Layout = ()
        self._called = False  # whether the hook of the model ran, which checks and prepares a call
        self._apart = False  # whether the call that follows computes one sample after the other
        self._gathered: dict[tuple[nn.Module, Hook], Any] = {}
        for path in family.attention:
            for module in find_modules(model, path):
                take_over(module, self.attention, handle)
        self._register(model)
        if family.text_masks or family.lists:
            handle.replace(model, "forward", self._forward)

    def _register(self, model: nn.Module) -> None:
        self.handle.before(model, self._before_model)
        for cut in self.family.cuts:
            for module in find_modules(model, cut.module) if cut.module else ():
                self.handle.before(module, self._cutting(module, cut))
        for module in (m for path in self.family.whole for m in find_modules(model, path)):
            self.handle.before(module, self._before_whole)
            self.handle.after(module, self._after_whole)
        self.handle.undo.callback(self._hook_gathered, [])
        self._hook_gathered(self._find_gathered(model))

    def _find_gathered(self, model: nn.Module) -> list[tuple[nn.Module, Hook]]:
        inside = [m for path in self.family.gathered_inside for m in find_modules(model, path)]
        last = find_modules(model, self.family.gathered)
        return [*((m, self._gather) for m in last), *((m, self._gather_inside) for m in inside)]

    def _hook_gathered(self, wanted: list[tuple[nn.Module, Hook]]) -> None:
        """Have these modules gather their output, and no others."""
        for hook in self._gathered.values():
            hook.remove()
        self._gathered = {pair: pair[0].register_forward_hook(pair[1]) for pair in wanted}

    @eager
    def _before_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
        """Check the arguments of a call of the model (supported, and the same on every rank), and
        prepare them, unless samples are computed one after the other."""
        arguments = by_name(parameter_names(model), args, kwargs)
        if (wanted := self._find_gathered(model)) != list(self._gathered):  # adapters came or went
            self._hook_gathered(wanted)
        leave_out_unused(arguments, self.family)
        if self.sp.size > 1:
            refuse_call(model, arguments, self.family)
            with self.handle.advising():
                self.sp.check_same(_leaves(arguments))
        self._apart = lengths_differ(arguments, self.family)
        if self._apart:
            refuse_cache(model)
        else:
            self._prepare(arguments)
        return (), arguments

    def _prepare(self, arguments: Kwargs) -> None:
        """Take the padding off the text of a call, and cut what no module but the model takes."""
        self._layout, self._called = (), True
        take_off_padding(arguments, self.family)
        for cut in self.family.cuts:
            if not cut.module:
                self._cut(cut, arguments)

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The model's forward: of samples with texts of different lengths one after the other."""
        return self._call_apart(original, kwargs) if self._apart else original(*args, **kwargs)

    @eager
    def _call_apart(self, original: Callable[..., Any], arguments: Kwargs) -> Any:
        self._apart = False
        outputs = list[Any]()
        for sample in samples_of(arguments, self.family):
            self._prepare(sample)
            outputs.append(original(**sample))
        return join(outputs)

    def _cutting(self, module: nn.Module, cut: Cut) -> Callable[..., Any]:
        """A hook that cuts arguments of `module`."""
        names = parameter_names(module)

        @eager
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
            arguments = by_name(names, args, kwargs)
            return ((), arguments) if self._cut(cut, arguments) else None

        return hook

    def _cut(self, cut: Cut, arguments: Kwargs) -> bool:
        """Cut arguments of a call; False if there is nothing to cut."""
        value = _get_argument(arguments, cut.streams[-1][0])
        if value is None or (cut.ndim and _is_for_all_tokens(value, cut)):
            return False
        layouts = [self._layout] if cut.reuses_layout else self._layouts(cut, arguments)
        for stream, layout, dim in zip(cut.streams, layouts, cut.dims, strict=False):
            take = partial(take_rows, self.sp, layout, dim)
            for path in set(stream) - {cut.kept}:
                rows = tree_map_only(Tensor, take, _get_argument(arguments, path))
                _set_argument(arguments, path, rows)
        self._layout = layouts[-1]
        return True

    def _layouts(self, cut: Cut, arguments: Kwargs) -> list[Layout]:
        """Return the layout of each stream."""
        first = [tree_leaves(_get_argument(arguments, stream[0]))[0] for stream in cut.streams]
        lengths = [tensor.shape[dim] for tensor, dim in zip(first, cut.dims, strict=False)]
        if cut.joint_mask:
            lengths.insert(0, arguments[cut.joint_mask].shape[-1] - lengths[0])
            arguments[cut.joint_mask] = None
        layouts = stream_layouts(self.sp, lengths, self.family.last_stream_attends_alone)
        if not self.family.allows_empty_stream and any(() in layout for layout in layouts):
            raise ValueError(
                f"streams of {lengths} tokens are too short for {self.sp.size} ranks: a rank would "
                "have no tokens of a stream, which this model does not support; give a longer "
                "text, or use fewer ranks"
            )
        return layouts[-len(cut.streams) :]

    @eager
    def _gather(self, _: nn.Module, __: Any, output: Any) -> Any:
        recomputed = torch._C._current_graph_task_id() >= 0  # in a backward, after the call
        if not self._layout or not (self._called or recomputed):
            raise NotImplementedError(
                "the first block of the model did not run in this call, where its tokens are cut: "
                "do not skip it. Or model.forward(...) was called in place of model(...), past the "
                "hooks, or a copy of an attached model: attach the copy of a model that is not"
            )
        self._called = False
        rows, *rest = output if isinstance(output, tuple) else (output,)
        whole = gather_rows(self.sp, self._layout, 1, rows, lambda grad, _: grad * self.sp.size)
        return (whole, *rest) if rest else whole

    @eager
    def _gather_inside(self, _: nn.Module, __: Any, rows: Tensor) -> Tensor:
        return gather_rows(self.sp, self._layout, 1, rows, partial(sum_on_all_ranks, self.sp.comm))

    @eager
    def _before_whole(self, module: nn.Module, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
        rows, *rest = args
        return (self._gather_inside(module, args, rows), *rest), kwargs

    @eager
    def _after_whole(self, _: nn.Module, __: Any, whole: Tensor) -> Tensor:
        return take_rows(self.sp, self._layout, 1, whole)


def _leaves(arguments: Kwargs) -> Kwargs:
    """The arguments, and what is in lists and tuples, by name ("x[0]")."""
    return {
        f"{name}{keystr(path)}": leaf
        for name, value in arguments.items()
        for path, leaf in tree_flatten_with_path(value)[0]
    }


def _is_for_all_tokens(value: Any, cut: Cut) -> bool:
    """Whether a value is no tensor with a row for each token."""
    return not isinstance(value, Tensor) or value.dim() < cut.ndim or value.shape[cut.dims[0]] == 1


def _get_argument(arguments: Kwargs, path: str) -> Any:
    """Return an argument ("name"), or an item of an argument that is a tuple ("name.1")."""
    name, _, index = path.partition(".")
    value = arguments.get(name)
    return value[int(index)] if index and value is not None else value


def _set_argument(arguments: Kwargs, path: str, value: Any) -> None:
    """Replace what `_get_argument` returns; an argument that is None stays as it is."""
    name, _, index = path.partition(".")
    if index:
        items = list(arguments[name])
        items[int(index)] = value
        arguments[name] = tuple(items)
    elif value is not None:
        arguments[name] = value


def stream_layouts(
    sp: SequenceParallel, lengths: Sequence[int], last_attends_alone: bool = False
) -> list[Layout]:
    """Return the layout of each stream: the rows of every rank, counted inside the stream.

    Ranks 0 to r together get c tokens. With n1 tokens of text and n2 of an image, these are
    floor(c n1 / (n1 + n2)) tokens of text, and the rest are tokens of the image.

    Args:
        lengths: tokens of each stream; one stream or two.
        last_attends_alone: the image gets the shards that it has without the text, and the rest
            are tokens of the text.
    """
    if len(lengths) == 1:
        return [_layout_between(_stops(sp, lengths[0]))]
    total = sum(lengths)
    stops = _stops(sp, total)
    if last_attends_alone:
        second_stops = _stops(sp, lengths[-1])
        first_stops = [stop - second for stop, second in zip(stops, second_stops, strict=True)]
    else:
        first_stops = [stop * lengths[0] // total for stop in stops]
        second_stops = [stop - first for stop, first in zip(stops, first_stops, strict=True)]
    return [_layout_between(first_stops), _layout_between(second_stops)]


def _stops(sp: SequenceParallel, length: int) -> list[int]:
    """Return 0, and how many of `length` tokens ranks 0 to r have together, for each r."""
    return list(accumulate(map(size, make_layout(sp.config.layout, sp.size, length)), initial=0))


def _layout_between(bounds: Sequence[int]) -> Layout:
    """Return the layout in which rank r owns the rows from bounds[r] to bounds[r + 1]."""
    return tuple(((a, b),) if a < b else () for a, b in pairwise(bounds))


def take_rows(sp: SequenceParallel, layout: Layout, dim: int, x: Tensor) -> Tensor:
    """Return this rank's rows of the whole x. The gradient is zero in all other rows."""
    if not layout[sp.rank]:
        return x.narrow(dim, 0, 0)
    return x.index_select(dim, positions(layout[sp.rank], x.device))


def gather_rows(
    sp: SequenceParallel,
    layout: Layout,
    dim: int,
    x: Tensor,
    sum_gradients: Callable[[Tensor, str], Tensor],
) -> Tensor:
    """Return the rows of all ranks. The gradient of this rank's rows is multiplied by `sp.size`.

    Every rank makes the same loss. With this factor the mean over the ranks of a parameter's
    gradient is that of one device, whether the parameter is used before the cut, between the cut
    and the gathering, or after it.

    Args:
        sum_gradients: (gradient of the whole on this rank, label) -> the sum of all ranks'.
    """

    def take_gradient(grad: Tensor, label: str) -> Tensor:
        return take_shard(sp.comm, layout, dim, sum_gradients(grad, label), label)

    return linear_map(x, partial(gather_shards, sp.comm, layout, dim), take_gradient, "sample")
