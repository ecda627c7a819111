"""What the rules are written in: the call of an operator, the rows that a slice of its output reads
of each input, and the call that computes the slice. Rows are indices of the sliced dimension."""

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
    """What rows [lo, hi) of the output need of one input: the whole input if `dim` is None, or
    rows [scale * lo - before, scale * hi + after) of its dimension `dim`."""

    dim: int | None
    scale: Fraction = Fraction(1)
    before: int = 0
    after: int = 0

    def unclipped(self, lo: int, hi: int) -> tuple[int, int]:
        """The rows that output rows [lo, hi) read, some of them perhaps beyond the border."""
        many, few = self.scale.as_integer_ratio()
        assert many * lo % few == many * hi % few == 0, (self, lo, hi)
        return many * lo // few - self.before, many * hi // few + self.after


# What a slice reads of each argument, by the argument's name; for a list of tensors a list of Rows.
# None, or a missing name: the whole argument.
Reads = Mapping[str, "Rows | None | Sequence[Rows | None]"]


@dataclass(frozen=True)
class Call:
    """The call of an operator: its arguments by name, in the schema's order, with the defaults.

    `shape` is the output's shape, or the first tensor's where the operator returns a list.
    """

    target: Callable[..., Any]
    values: Mapping[str, Any]
    shape: Shape

    @staticmethod
    def from_node(node: fx.Node) -> Call:
        shape = shape_of(node)
        assert shape is not None and callable(node.target)
        values = by_name(node.target, node.args, node.kwargs)
        if isinstance(node.target, OpOverload):
            values = {a.name: a.default_value for a in node.target._schema.arguments} | values
        return Call(node.target, values, shape)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    def size(self, name: str) -> Shape:
        """The shape of the tensor argument `name`."""
        shape = shape_of(self.values[name])
        assert shape is not None, name
        return shape

    def has(self, name: str) -> bool:
        """Whether the argument `name` was given as a tensor."""
        return isinstance(self.values.get(name), fx.Node)

    def tensors(self) -> dict[str, fx.Node]:
        """The arguments that are tensors (not lists of tensors), by name."""
        return {name: value for name, value in self.values.items() if isinstance(value, fx.Node)}


@dataclass(frozen=True)
class RowSlice:
    """Rows [lo, hi) of dimension `dim` of the output of `call`, which a rule adds to `graph`.

    `args` and `kwargs` are the operator's, with nodes of `graph` that hold the rows it reads.
    """

    graph: fx.Graph
    call: Call
    dim: int
    lo: int
    hi: int
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def arguments(self) -> dict[str, Any]:
        return by_name(self.call.target, self.args, self.kwargs)

    @property
    def shape(self) -> list[int]:
        """The shape of the slice."""
        sizes = list(self.call.shape)
        sizes[self.dim] = self.hi - self.lo
        return sizes

    def call_function(self, target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def call_same(self, /, **changed: Any) -> fx.Node:
        """Calls the same operator, with the arguments named in `changed` replaced."""
        names = argument_names(self.call.target)
        args = tuple(
            changed.pop(name, value) for name, value in zip(names, self.args, strict=False)
        )
        return self.graph.call_function(self.call.target, args, {**self.kwargs, **changed})


@dataclass(frozen=True)
class Rule:
    """How an operator is sliced along dimension `dim` of its output.

    reads(call, dim): what a slice reads of each argument; None where `dim` cannot be sliced.
    write(slice): adds the call that computes a slice; by default the same operator.
    """

    reads: Callable[[Call, int], Reads | None]
    write: Callable[[RowSlice], fx.Node] = RowSlice.call_same


Table = dict[Callable[..., Any], Rule]


def table(rule: Rule, names: str) -> Table:
    """The same rule for several ATen operators, and so for their in-place variants."""
    return {getattr(aten, name): rule for name in names.split()}


def shape_of(value: object) -> Shape | None:
    """The shape of a node's tensor, or of the first one of its list; None for other values."""
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
    """The arguments that were passed, by name, in the order of the call."""
    return {**dict(zip(argument_names(target), args, strict=False)), **kwargs}


def axis(dim: int, ndim: int) -> int:
    """`dim`, counted from the front where it is negative."""
    return dim + ndim if dim < 0 else dim


def same_rows(call: Call, dim: int) -> Reads:
    """The same rows of the first tensor argument."""
    return {next(iter(call.tensors())): Rows(dim)}


def same_rows_if(is_allowed: Callable[[Call, int], bool]) -> Rule:
    """The same rows of the first tensor argument, along the dimensions that are allowed."""
    return Rule(lambda call, dim: same_rows(call, dim) if is_allowed(call, dim) else None)


def not_last(num_dims: int) -> Rule:
    """The same rows of the first tensor, along any dimension but the last `num_dims`."""
    return same_rows_if(lambda call, dim: dim < len(call.shape) - num_dims)


def broadcast(shape: Shape | None, dim: int, out: Shape) -> Rows | None:
    """What rows of dimension `dim` of `out` read of an input of `shape` that is broadcast to `out`:
    its rows, or all of it (None) where it lacks that dimension or has size 1."""
    input_dim = dim - len(out) + len(shape or ())
    has_rows = shape and input_dim >= 0 and shape[input_dim] == out[dim]
    return Rows(input_dim) if has_rows else None
