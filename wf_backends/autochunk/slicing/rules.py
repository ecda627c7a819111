"""The rules of all operators, applied to nodes of a graph: what slices read, and their calls.

An operator without a rule is a *wall*: no region of a plan contains it. Unknown operators,
operators that draw random numbers and collectives are walls.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import lcm
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils import _pytree as pytree

from wf_backends.autochunk.slicing import (
    group_norm,
    rules_attention,
    rules_elementwise,
    rules_products,
    rules_space,
    rules_views,
)
from wf_backends.autochunk.slicing.call import (
    Call,
    Rows,
    RowSlice,
    Rule,
    Table,
    aten,
    by_name,
    shape_of,
)

TABLE: Table = {
    **group_norm.TABLE,
    **rules_attention.TABLE,
    **rules_elementwise.TABLE,
    **rules_products.TABLE,
    **rules_space.TABLE,
    **rules_views.TABLE,
}

# Operators that give a view of a whole tensor, but may copy a slice: its strides are different.
MAY_COPY = (*rules_views.RESHAPES, aten.contiguous)

Value = tuple[fx.Node, int | None]  # a node's output and its sliced dimension (None: not sliced)


@dataclass(frozen=True)
class Source(Rows):
    """The rows that a slice of an operator reads of `node`, one of the operator's arguments."""

    node: fx.Node = field(kw_only=True)

    @property
    def value(self) -> Value:
        return self.node, self.dim

    def rows(self, lo: int, hi: int) -> tuple[int, int]:
        """The rows of `node` that rows [lo, hi) of the output read, padding left out; one row if
        there is nothing but padding, because many operators refuse a tensor without rows."""
        shape = shape_of(self.node)
        assert shape is not None and self.dim is not None
        first, last = self.unclipped(lo, hi)
        first = min(max(first, 0), shape[self.dim] - 1)
        return first, min(max(last, first + 1), shape[self.dim])


def sources(node: fx.Node, dim: int) -> tuple[Source, ...] | None:
    """What `node` reads when dimension `dim` of its output is computed slice by slice.

    One Source for each node among its arguments, in the order of `torch.fx.node.map_arg`; none for
    an operator without tensor arguments, such as `zeros`. Where a node returns a list of tensors,
    `dim` is a dimension of each of them.

    None if the node cannot be sliced along `dim`: it is a wall, the dimension has size 1, or the
    node would read a slice of a weight whose `meta["whole"]` forbids that.
    """
    rule = rule_of(node.target) if node.op == "call_function" else None
    if rule is None or not may_slice(node, dim) or loses_a_write(node):
        return None
    call = Call.from_node(node)
    reads = rule.reads(call, dim)
    if reads is None:
        return None
    node_sources: list[Source] = []
    for name, value in by_name(call.target, node.args, node.kwargs).items():
        node_sources += tensor_sources(value, reads.get(name))
    if any(source.dim is not None and source.node.meta.get("whole") for source in node_sources):
        return None
    return tuple(node_sources)


def alignment(node_sources: Iterable[Source]) -> int:
    """A slice's `lo` and `hi` must be multiples of it: so many rows share an input row."""
    return lcm(*(source.scale.denominator for source in node_sources))


def emit(
    graph: fx.Graph,
    node: fx.Node,
    dim: int,
    rows: tuple[int, int],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> fx.Node:
    """Adds to `graph` the call that computes rows [lo, hi) of dimension `dim` of `node`.

    Args:
        args, kwargs: those of the node, with each argument node replaced by a node of `graph` that
            holds the rows that `sources` names (the whole value, where its `dim` is None).
    """
    rule = rule_of(node.target)
    assert rule is not None, node
    return rule.write(RowSlice(graph, Call.from_node(node), dim, *rows, tuple(args), kwargs))


@cache
def rule_of(target: object) -> Rule | None:
    """The rule of an operator; an in-place operator has the rule of its out-of-place variant.

    A callable that is no operator of torch may have its own, in the attribute `rule`.
    """
    if not isinstance(target, OpOverload):
        return TABLE.get(target, getattr(target, "rule", None)) if callable(target) else None
    if torch.Tag.inplace_view in target.tags or written_names(target) not in ([], ["self"]):
        return None
    if torch.Tag.pointwise in target.tags:
        random = torch.Tag.nondeterministic_seeded in target.tags
        return None if random else rules_elementwise.POINTWISE
    packet = target.overloadpacket
    return TABLE.get(packet) or TABLE.get(out_of_place(packet))


def out_of_place(packet: OpOverloadPacket) -> Callable[..., Any]:
    """The out-of-place variant of an in-place packet (`add` for `add_`), or the packet itself."""
    name = packet.__name__
    inplace = name.endswith("_") and not name.endswith("__")
    return getattr(aten, name[:-1], packet) if inplace else packet


def tensor_sources(value: object, rows: Rows | None | Sequence[Rows | None]) -> Iterator[Source]:
    """One Source for each node in the value of an argument of which a slice reads `rows`."""
    if isinstance(value, fx.Node):
        assert not isinstance(rows, Sequence)
        yield Source(**vars(rows or Rows(None)), node=value)
    elif isinstance(value, list | tuple):
        rows_per_item = rows if isinstance(rows, Sequence) else [rows] * len(value)
        for item, item_rows in zip(value, rows_per_item, strict=True):
            yield from tensor_sources(item, item_rows)


def may_slice(node: fx.Node, dim: int) -> bool:
    """Whether all outputs of `node` have the same size above 1 at `dim`, and all inputs are tensors
    or lists of them."""
    value = node.meta.get("val")
    shapes = map(shape_of, value if isinstance(value, list | tuple) else [value])
    sizes = {shape[dim] if shape and 0 <= dim < len(shape) else 0 for shape in shapes}
    readable = all(shape_of(source) is not None for source in node.all_input_nodes)
    return readable and len(sizes) == 1 and sizes.pop() > 1


def loses_a_write(node: fx.Node) -> bool:
    """Whether `node` writes through a reshape to a tensor that others read: in a slice the reshape
    may copy, and they would not see the write."""
    view, may_copy = next(iter(written(node)), None), False
    while view and (base := view_base(view)):
        may_copy |= getattr(view.target, "overloadpacket", None) in MAY_COPY
        if may_copy and len(base.users) > 1:
            return True
        view = base
    return False


def written(node: fx.Node) -> tuple[fx.Node, ...]:
    """The arguments that an operator writes to: `self` of an in-place operator, or `out`."""
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return ()
    arguments = by_name(node.target, node.args, node.kwargs)
    values = pytree.tree_leaves([arguments.get(name) for name in written_names(node.target)])
    return tuple(value for value in values if isinstance(value, fx.Node))


def written_names(target: OpOverload) -> list[str]:
    return [a.name for a in target._schema.arguments if a.alias_info and a.alias_info.is_write]


def view_base(node: fx.Node) -> fx.Node | None:
    """The argument of which the output of `node` may be a view; None if it is no view."""
    target, base = node.target, next(iter((*written(node), *node.args)), None)
    if isinstance(target, OpOverload):
        alias = any(a.alias_info for a in target._schema.returns)
        alias = alias or target.overloadpacket is aten.dropout  # returns its input if not training
    else:
        alias = target is operator.getitem
    return base if alias and isinstance(base, fx.Node) else None


def changed(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes whose memory some of these operators write: no views."""
    bases = set[fx.Node]()
    for value in (value for node in nodes for value in written(node)):
        while base := view_base(value):
            value = base
        bases.add(value)
    return bases
