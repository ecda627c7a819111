"""What may be computed slice by slice: the rules of all operators, and the sliced calls.

An operator without a rule is a wall: no region of a plan crosses it. Unknown operators, what draws
random numbers and collectives have none.
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

from wf_backends.slicing import (
    group_norm,
    rules_attention,
    rules_elementwise,
    rules_products,
    rules_select,
    rules_space,
    rules_views,
)
from wf_backends.slicing.call import Call, Rows, Rule, Slice, Table, aten, by_name, shape_of
from wf_backends.slicing.rules_experts import EXPERTS, Experts

TABLE: Table = {
    **group_norm.TABLE,
    **rules_attention.TABLE,
    **rules_elementwise.TABLE,
    **rules_products.TABLE,
    **rules_select.TABLE,
    **rules_space.TABLE,
    **rules_views.TABLE,
}

# Views of a whole tensor that may be copies of a slice of it, which lies otherwise in memory.
MAY_COPY = (*rules_views.RESHAPES, aten.contiguous)


Value = tuple[fx.Node, int | None]  # a node, and the dimension that is sliced (None: whole)


@dataclass(frozen=True)
class Source(Rows):
    """What a sliced operator reads of `node`, one of its arguments."""

    node: fx.Node = field(kw_only=True)

    @property
    def value(self) -> Value:
        return self.node, self.dim

    def rows(self, lo: int, hi: int) -> tuple[int, int]:
        """What rows [lo, hi) of the output read of what `node` has; both fit the granule."""
        shape = shape_of(self.node)
        assert shape is not None and self.dim is not None
        first, last = (min(max(row, 0), shape[self.dim]) for row in self.read(lo, hi))
        return first, max(first, last)


def sources(node: fx.Node, dim: int) -> tuple[Source, ...] | None:
    """What `node` reads when dimension `dim` of its output is computed slice by slice.

    One Source for each node among its arguments, in the order of `torch.fx.node.map_arg`. Of a node
    that gives a list of tensors, `dim` is a dimension of each of them.

    Of a node that reads no tensor, such as `zeros`, it is empty.

    None: a wall. So is every dimension of size 1, and one of a weight that is not to be sliced.
    """
    rule = rule_of(node.target) if node.op == "call_function" else None
    if rule is None or not may_slice(node, dim) or loses_a_write(node):
        return None
    call = Call.of(node)
    reads = rule.reads(call, dim)
    if reads is None:
        return None
    found: list[Source] = []
    for name, value in by_name(call.target, node.args, node.kwargs).items():
        found += tensor_sources(value, reads.get(name))
    if any(source.dim is not None and source.node.meta.get("whole") for source in found):
        return None
    return tuple(found)


def granule(found: Iterable[Source]) -> int:
    """`lo` and `hi` of a slice must be multiples of it: rows that share one input row."""
    return lcm(*(source.scale.denominator for source in found))


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
        args, kwargs: the node's own, with every node replaced by the one of `graph` that holds the
            rows that `sources` asks for (all of them, where its `dim` is None).
    """
    rule = rule_of(node.target)
    assert rule is not None, node
    return rule.write(Slice(graph, Call.of(node), dim, *rows, tuple(args), kwargs))


@cache
def rule_of(target: object) -> Rule | None:
    """The rule of an operator; an in-place one has that of its out-of-place twin."""
    if isinstance(target, Experts):
        return EXPERTS
    if not isinstance(target, OpOverload):
        return TABLE.get(target) if callable(target) else None
    written = [a.name for a in target._schema.arguments if a.alias_info and a.alias_info.is_write]
    if torch.Tag.inplace_view in target.tags or written not in ([], ["self"]):
        return None
    if torch.Tag.pointwise in target.tags:
        random = torch.Tag.nondeterministic_seeded in target.tags
        return None if random else rules_elementwise.POINTWISE
    packet = target.overloadpacket
    return TABLE.get(packet) or TABLE.get(twin(packet))


def twin(packet: OpOverloadPacket) -> Callable[..., Any]:
    """The out-of-place packet of an in-place one: `add` of `add_`."""
    name = packet.__name__
    inplace = name.endswith("_") and not name.endswith("__")
    return getattr(aten, name[:-1], packet) if inplace else packet


def tensor_sources(value: object, rows: Rows | None | Sequence[Rows | None]) -> Iterator[Source]:
    """One Source for each node in an argument's value."""
    if isinstance(value, fx.Node):
        assert not isinstance(rows, Sequence)
        yield Source(**vars(rows or Rows(None)), node=value)
    elif isinstance(value, list | tuple):
        each = rows if isinstance(rows, Sequence) else [rows] * len(value)
        for item, own in zip(value, each, strict=True):
            yield from tensor_sources(item, own)


def may_slice(node: fx.Node, dim: int) -> bool:
    """Whether `node` gives tensors that all have `dim`, as large, and reads nothing but tensors."""
    value = node.meta.get("val")
    shapes = map(shape_of, value if isinstance(value, list | tuple) else [value])
    sizes = {shape[dim] if shape and 0 <= dim < len(shape) else 0 for shape in shapes}
    readable = all(shape_of(source) is not None for source in node.all_input_nodes)
    return readable and len(sizes) == 1 and sizes.pop() > 1


def loses_a_write(node: fx.Node) -> bool:
    """Whether what `node` writes in place is read through a reshape, which may copy once sliced."""
    if not writes(node):
        return False
    (base, *_), may_copy = written(node), False
    while isinstance(base, fx.Node) and (below := viewed(base)):
        may_copy |= getattr(base.target, "overloadpacket", None) in MAY_COPY
        base = below
        if may_copy and len(base.users) > 1:
            return True
    return False


def writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def written(node: fx.Node) -> tuple[fx.Node, ...]:
    """The arguments that an operator writes to: `self` of one in place, or `out`."""
    if not isinstance(node.target, OpOverload):
        return ()
    names = [
        a.name for a in node.target._schema.arguments if a.alias_info and a.alias_info.is_write
    ]
    given = by_name(node.target, node.args, node.kwargs)
    found = pytree.tree_leaves([given.get(name) for name in names])
    return tuple(value for value in found if isinstance(value, fx.Node))


def viewed(node: fx.Node) -> fx.Node | None:
    """The node whose memory `node` may give again."""
    target, base = node.target, next(iter((*written(node), *node.args)), None)
    if isinstance(target, OpOverload):
        alias = any(a.alias_info for a in target._schema.returns)
        alias = alias or target.overloadpacket is aten.dropout  # itself, unless it draws
    else:
        alias = target is operator.getitem
    return base if alias and isinstance(base, fx.Node) else None
