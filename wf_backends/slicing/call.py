"""One call of an operator as the rules see it: arguments by name, sizes, the call of a slice."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

aten = torch.ops.aten

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """Rows [scale * lo - before, scale * hi + after) of `dim`, for rows [lo, hi) of the output.

    `dim` is None where they need all of it.
    """

    dim: int | None
    scale: Fraction = Fraction(1)
    before: int = 0
    after: int = 0

    def read(self, lo: int, hi: int) -> tuple[int, int]:
        """What rows [lo, hi) of the output read; some of it may lie beyond the border."""
        first, last = self.scale * lo - self.before, self.scale * hi + self.after
        assert first.denominator == last.denominator == 1, (self, lo, hi)
        return int(first), int(last)


# What an operator reads of each argument, by its name; one entry for each tensor of a list.
# None, or a name that is missing: all of it.
Reads = Mapping[str, "Rows | None | Sequence[Rows | None]"]


@dataclass(frozen=True)
class Call:
    """A node's operator with its arguments by the names of its schema, defaults filled in.

    `shape` is the output's; of an operator that returns a list, its first tensor's.
    """

    target: Callable[..., Any]
    values: Mapping[str, Any]
    shape: Shape

    @staticmethod
    def of(node: fx.Node) -> Call:
        shape = shape_of(node)
        assert shape is not None and callable(node.target)
        values = by_name(node.target, node.args, node.kwargs)
        if isinstance(node.target, OpOverload):
            arguments = node.target._schema.arguments
            values = {a.name: a.default_value for a in arguments if a.has_default_value()} | values
        return Call(node.target, values, shape)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    def size(self, name: str) -> Shape:
        """Sizes of the tensor argument `name`."""
        shape = shape_of(self.values[name])
        assert shape is not None, name
        return shape

    def has(self, name: str) -> bool:
        """Whether the argument `name` is a tensor here."""
        return isinstance(self.values.get(name), fx.Node)

    def tensors(self) -> dict[str, fx.Node]:
        """The arguments that are one tensor each."""
        return {name: value for name, value in self.values.items() if isinstance(value, fx.Node)}


@dataclass(frozen=True)
class Slice:
    """The call to add to `graph`: rows [lo, hi) of `dim` of `call`, with the inputs in `args`."""

    graph: fx.Graph
    call: Call
    dim: int
    lo: int
    hi: int
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def given(self) -> dict[str, Any]:
        return by_name(self.call.target, self.args, self.kwargs)

    @property
    def shape(self) -> list[int]:
        """Sizes of the sliced output."""
        sizes = list(self.call.shape)
        sizes[self.dim] = self.hi - self.lo
        return sizes

    def put(self, target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def again(self, /, **changed: Any) -> fx.Node:
        """The same operator, with the arguments named in `changed` replaced."""
        names = argument_names(self.call.target)
        args = tuple(
            changed.pop(name, value) for name, value in zip(names, self.args, strict=False)
        )
        return self.graph.call_function(self.call.target, args, {**self.kwargs, **changed})


@dataclass(frozen=True)
class Rule:
    """How an operator is sliced along dimension `dim` of its output.

    reads(call, dim): what it reads then; None where it cannot be sliced so.
    write(slice): adds the sliced call; by default the operator as it stands.
    """

    reads: Callable[[Call, int], Reads | None]
    write: Callable[[Slice], fx.Node] = Slice.again


Table = dict[Callable[..., Any], Rule]


def table(rule: Rule, names: str) -> Table:
    """One rule for several of ATen's operators. A packet stands for its in-place twin, too."""
    return {getattr(aten, name): rule for name in names.split()}


def shape_of(value: object) -> Shape | None:
    """Sizes of a node's tensor, or of the first of its tensors; None if it is no tensor."""
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
    if isinstance(value, list | tuple) and value:
        value = value[0]
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


@cache
def argument_names(target: Callable[..., Any]) -> tuple[str, ...]:
    if isinstance(target, OpOverload):
        return tuple(argument.name for argument in target._schema.arguments)
    return tuple(inspect.signature(target).parameters)


def by_name(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments that were passed, by name, in their order."""
    return {**dict(zip(argument_names(target), args, strict=False)), **kwargs}


def axis(dim: int, ndim: int) -> int:
    """`dim` counted from the front."""
    return dim + ndim if dim < 0 else dim


def same_rows(call: Call, dim: int) -> Reads:
    """Those of the first tensor."""
    return {next(iter(call.tensors())): Rows(dim)}


def broadcast(shape: Shape | None, dim: int, out: Shape) -> Rows | None:
    """The rows that an input of `shape` gives to dimension `dim` of `out`; None: all of it."""
    own = dim - len(out) + len(shape or ())
    return Rows(own) if shape and own >= 0 and shape[own] == out[dim] else None
