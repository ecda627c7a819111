"""Which operators of a graph may be computed slice by slice together, and along which dimensions.

A flow starts at one value and one of its dimensions and goes back through the graph, operator by
operator, by the rules (arXiv 2401.10652, section 3.2): where an operator's output is sliced along a
dimension, its inputs are sliced along theirs, or needed whole. An operator that has no rule, that
is needed whole, or that two readers want sliced differently stays outside, and so does everything
that it depends on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from torch import fx

from wf_backends.slicing.rules import Source, Value, granule, sources

RowsOf = dict[Value, tuple[int, int]]  # of what a slice reads or computes, the rows [lo, hi)


@dataclass(frozen=True)
class Sliced:
    """One operator of a flow.

    Its output is sliced along `dim`; `scale` of its rows belong to one row of the flow's end.
    `sources` says what its arguments give, one for each node among them.
    """

    node: fx.Node
    dim: int
    scale: Fraction
    sources: tuple[Source, ...]

    @cached_property
    def granule(self) -> int:
        """Slices begin at multiples of so many of its rows."""
        return granule(self.sources)

    @property
    def value(self) -> Value:
        return self.node, self.dim

    @property
    def rows(self) -> int:
        """The size of the sliced dimension (of a list's first tensor)."""
        value = self.node.meta["val"]
        return (value[0] if isinstance(value, (list, tuple)) else value).shape[self.dim]


@dataclass(frozen=True)
class Flow:
    """Operators that are computed slice by slice together, in the graph's order; the last is the
    flow's end."""

    operators: tuple[Sliced, ...]

    @cached_property
    def unit(self) -> int:
        """Slices of the end are so many rows or a multiple: they begin at whole rows of each
        operator."""
        steps = {(op.scale, op.granule) for op in self.operators}
        return math.lcm(*((s / g).denominator for s, g in steps))

    @cached_property
    def members(self) -> frozenset[fx.Node]:
        return frozenset(op.node for op in self.operators)

    @cached_property
    def inputs(self) -> tuple[Value, ...]:
        """What the operators read of other nodes."""
        read = dict.fromkeys(source.value for op in self.operators for source in op.sources)
        return tuple(value for value in read if value[0] not in self.members)

    @cached_property
    def outputs(self) -> tuple[Sliced, ...]:
        """The operators that others read, the flow's end last."""
        return tuple(op for op in self.operators if not self.members.issuperset(op.node.users))

    @cached_property
    def halves(self) -> tuple[RowsOf, RowsOf]:
        """`rows_of` two slices: what is so for these is so for any number."""
        middle = self.rows // self.unit // 2 * self.unit
        return rows_of(self, 0, middle), rows_of(self, middle, self.rows)

    @property
    def end(self) -> Sliced:
        return self.operators[-1]

    @property
    def rows(self) -> int:
        return self.end.rows

    def around(self, window: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """The other nodes of a window: those to run before the flow, and those that depend on
        it."""
        others = [node for node in window if node not in self.members]
        behind = set(self.members)
        for node in others:
            if not behind.isdisjoint(node.all_input_nodes):
                behind.add(node)
        return [n for n in others if n not in behind], [n for n in others if n in behind]


def trace(
    window: Sequence[fx.Node],
    dim: int,
    sources: Callable[[fx.Node, int], tuple[Source, ...] | None] = sources,
) -> Flow | None:
    """The flow that ends at the last node of `window`, sliced along `dim`, within the window.

    None: that node has no rule for this dimension.
    """
    wanted: dict[fx.Node, tuple[int, Fraction] | None] = {window[-1]: (dim, Fraction(1))}
    operators: list[Sliced] = []
    for node in reversed(window):
        if node not in wanted:
            continue
        want = wanted[node]  # None: all of it
        found = want and sources(node, want[0])
        if want is None or found is None:
            wanted.update(dict.fromkeys(node.all_input_nodes))
            continue
        along, scale = want
        operators.append(Sliced(node, along, scale, found))
        for source in found:
            rows = None if source.dim is None else (source.dim, scale * source.scale)
            if wanted.setdefault(source.node, rows) != rows:
                wanted[source.node] = None
    return Flow(tuple(reversed(operators))) if operators else None


def rows_of(flow: Flow, lo: int, hi: int) -> RowsOf:
    """The rows of each operator and of each sliced input that rows [lo, hi) of the flow's end need.

    An operator whose readers need different rows (convolutions read a halo) computes all of them,
    from a multiple of its granule to one.
    """
    rows: RowsOf = {flow.end.value: (lo, hi)}
    for op in reversed(flow.operators):
        first, last = rows[op.value]
        last = min(-(-last // op.granule) * op.granule, op.rows)
        rows[op.value] = (first // op.granule * op.granule, last)
        for source in op.sources:
            if source.dim is not None:
                first, last = source.rows(*rows[op.value])
                known = rows.get(source.value, (first, last))
                rows[source.value] = (min(first, known[0]), max(last, known[1]))
    return rows
