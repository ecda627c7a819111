"""Every rule against slicing itself: rows of f(x) from the rows of x that the rule names."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from tests.slicing.drawn import Case, Draw
from tests.slicing.rule_cases import CASES
from tests.slicing.slicing import assert_slices, tensors
from wf_backends.slicing.rules import TABLE, emit, sources

SEEDS = range(3)

aten = torch.ops.aten


def as_graph(case: Case, draw: Draw) -> fx.Node:
    """One call in a graph, each tensor a placeholder with its value."""
    graph = fx.Graph()

    def placeholder(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder("x")
        node.meta["val"] = value
        return node

    args = tree_map(placeholder, case.build(draw))
    node = graph.call_function(case.target, args, dict(case.kwargs))
    values, kwargs = fx.node.map_arg((node.args, node.kwargs), own_value)
    node.meta["val"] = node.target(*values, **kwargs)
    return node


def own_value(node: fx.Node) -> Tensor:
    return node.meta["val"].clone()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_of_the_output_are_computed_from_the_rows_that_the_rule_names(case: Case) -> None:
    for seed in SEEDS:
        node = as_graph(case, Draw(seed))
        whole = node.meta["val"]
        assert (
            tuple(d for d in range(tensors(whole)[0].ndim) if sources(node, d) is not None)
            == case.dims
        )
        for dim in case.dims:
            assert_slices(node, dim, whole, own_value, seed)


def test_every_entry_of_the_table_has_a_case_that_is_sliced() -> None:
    sliced = {getattr(case.target, "overloadpacket", case.target) for case in CASES if case.dims}
    elsewhere = {operator.getitem, aten.empty, aten.new_empty}  # in the models; have no values
    assert [str(entry) for entry in set(TABLE) - sliced - elsewhere] == []


def test_scores_that_are_added_to_nothing_are_sliced_with_it() -> None:
    """As diffusers' eager attention computes them."""
    graph = fx.Graph()
    empty = graph.call_function(aten.empty.memory_format, ([2, 6, 5],))
    empty.meta["val"] = torch.empty(2, 6, 5)
    assert sources(empty, 1) == ()
    rows = fx.Graph()
    rows.output(emit(rows, empty, 1, (2, 5), empty.args, empty.kwargs))
    assert fx.Interpreter(torch.nn.Module(), graph=rows).run().shape == (2, 3, 5)
