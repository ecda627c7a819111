"""Which operators of a graph may be computed slice by slice together, and along which dimensions.

A flow is traced from its last operator, its *end*, and one dimension of the end's output, backwards
through the graph (arXiv 2401.10652, section 3.2). An operator's rule says along which dimension
each of its inputs is sliced then, or that it is needed whole. An operator is not part of the flow
if it has no rule, if its output is needed whole, or if two readers need it sliced along different
dimensions; neither is anything that such an operator depends on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from torch import Tensor, fx

from wf_backends.autochunk.slicing.call import aten
from wf_backends.autochunk.slicing.rules import Source, Value, alignment, sources, view_base

PERMUTATIONS = aten.permute.default, aten.transpose.int
NUMBERS = aten.full.default, aten.scalar_tensor.default

RowsByValue = dict[Value, tuple[int, int]]  # rows [lo, hi) of each value that a slice needs


@dataclass(frozen=True)
class SlicedOperator:
    """One operator of a flow, whose output is sliced along `dim`.

    For one row of the flow's end it computes `scale` rows (without halos). `sources` says what it
    reads of each node among its arguments.
    """

    node: fx.Node
    dim: int
    scale: Fraction
    sources: tuple[Source, ...]

    @cached_property
    def alignment(self) -> int:
        """Slices of its output begin at multiples of this many rows."""
        return alignment(self.sources)

    @property
    def value(self) -> Value:
        return self.node, self.dim

    @property
    def rows(self) -> int:
        """The size of the sliced dimension (of the first tensor, where it returns a list)."""
        value = self.node.meta["val"]
        return (value[0] if isinstance(value, (list, tuple)) else value).shape[self.dim]


@dataclass(frozen=True)
class Flow:
    """Operators that are sliced together, in the graph's order; the last one is the flow's end."""

    operators: tuple[SlicedOperator, ...]

    @cached_property
    def alignment(self) -> int:
        """Slices of the end begin at multiples of this many rows, so that the slices of every
        operator begin at multiples of its alignment."""
        ratios = {op.scale / op.alignment for op in self.operators}
        return math.lcm(*(ratio.denominator for ratio in ratios))

    @cached_property
    def members(self) -> frozenset[fx.Node]:
        return frozenset(op.node for op in self.operators)

    @cached_property
    def inputs(self) -> tuple[Value, ...]:
        """The values of other nodes that the operators read, each once, without the numbers."""
        return tuple(value for value in self._read if not _is_number(value[0]))

    @cached_property
    def numbers(self) -> tuple[Value, ...]:
        """The numbers that the operators read. Each slice makes its own, such as the scale of
        scores: torch's compiler makes fused attention only of what reads a number alone."""
        return tuple(value for value in self._read if _is_number(value[0]))

    @cached_property
    def _read(self) -> tuple[Value, ...]:
        read = dict.fromkeys(source.value for op in self.operators for source in op.sources)
        return tuple(value for value in read if value[0] not in self.members)

    @cached_property
    def outputs(self) -> tuple[SlicedOperator, ...]:
        """The operators that nodes outside the flow read; the flow's end is the last one."""
        return tuple(op for op in self.operators if not self.members.issuperset(op.node.users))

    @cached_property
    def halves(self) -> tuple[RowsByValue, RowsByValue]:
        """The rows that each half of the end's rows needs. What holds for two slices (which rows
        are computed, which are read twice) holds for any number."""
        middle = self.rows // self.alignment // 2 * self.alignment
        return needed_rows(self, 0, middle), needed_rows(self, middle, self.rows)

    @property
    def end(self) -> SlicedOperator:
        return self.operators[-1]

    @property
    def rows(self) -> int:
        return self.end.rows

    def others(self, window: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """The nodes of a window outside the flow: those to run before it, and those to run after
        it because they depend on it."""
        others = [node for node in window if node not in self.members]
        dependent = set(self.members)
        for node in others:
            if not dependent.isdisjoint(node.all_input_nodes):
                dependent.add(node)
        return [n for n in others if n not in dependent], [n for n in others if n in dependent]


def trace(window: Sequence[fx.Node], dim: int) -> Flow | None:
    """The flow within `window` that ends at its last node, sliced along `dim`; None if there is no
    such flow."""
    # How the operators so far need each node sliced: dimension and scale; None: needed whole.
    needs: dict[fx.Node, tuple[int, Fraction] | None] = {window[-1]: (dim, Fraction(1))}
    operators: list[SlicedOperator] = []
    for node in reversed(window):
        if node not in needs:
            continue
        need = needs[node]
        node_sources = sources(node, need[0]) if need else None
        if need is None or node_sources is None:
            needs.update(dict.fromkeys(node.all_input_nodes))
            continue
        operators.append(SlicedOperator(node, *need, node_sources))
        for source in node_sources:
            source_need = None if source.dim is None else (source.dim, need[1] * source.scale)
            if needs.setdefault(source.node, source_need) != source_need:
                needs[source.node] = None  # two readers need it sliced differently
    return Flow(tuple(reversed(operators))) if operators else None


def with_permutations(flow: Flow, kept: fx.Node | None) -> Flow:
    """The flow and the permutations of its sliced inputs that nothing else reads, without `kept`.

    torch's compiler makes fused attention of a slice only if no cut is between the permutation of
    the keys and their product.
    """
    operators, inputs = [*flow.operators], [*flow.inputs]
    while inputs:
        node, dim = inputs.pop()
        if dim is None or node is kept or node.target not in PERMUTATIONS:
            continue
        readers = [(op, s) for op in operators for s in op.sources if s.node is node]
        needs = {(source.dim, op.scale * source.scale) for op, source in readers}
        node_sources = sources(node, dim)
        if node_sources and len(needs) == 1 and node.users.keys() <= {op.node for op, _ in readers}:
            ((_, scale),) = needs
            operators.insert(0, SlicedOperator(node, dim, scale, node_sources))
            inputs.append(node_sources[0].value)
    return Flow(tuple(operators))


def _is_number(node: fx.Node) -> bool:
    """Whether a node is a constant without dimensions that nothing changes."""
    is_constant = node.target in NUMBERS and node.meta["val"].ndim == 0
    return is_constant and not any(view_base(user) is node for user in node.users)


def needed_rows(flow: Flow, lo: int, hi: int) -> RowsByValue:
    """The rows of each operator and of each sliced input that rows [lo, hi) of the flow's end need.

    An operator whose readers need different rows (convolutions read a halo) computes all of them,
    rounded outwards to its alignment; the items of a list have all rows that any of them needs.
    """
    rows: RowsByValue = {flow.end.value: (lo, hi)}
    for op in reversed(flow.operators):
        first, last = rows[op.value]
        first = first // op.alignment * op.alignment
        last = min(-(-last // op.alignment) * op.alignment, op.rows)
        rows[op.value] = (first, last)
        if not isinstance(op.node.meta["val"], Tensor):  # a list is not cut: its items are
            rows.update({value: (first, last) for value in rows if value[0] in op.node.users})
        for source in op.sources:
            if source.dim is not None:
                source_first, source_last = source.rows(first, last)
                known_first, known_last = rows.get(source.value, (source_first, source_last))
                rows[source.value] = (min(source_first, known_first), max(source_last, known_last))
    return rows
