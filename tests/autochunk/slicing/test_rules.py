"""Every rule: rows of an operator's output equal those computed from the rows that the rule names.

The reference is the operator on its whole inputs, in float64; sizes are drawn.
"""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from tests.autochunk.slicing.drawn import Case, Draw, node_of, value_of
from tests.autochunk.slicing.rule_cases import CASES
from tests.autochunk.slicing.slicing import assert_slices, tensors
from wf_backends.autochunk.slicing.rules import TABLE, emit, sources

SEEDS = range(3)

aten = torch.ops.aten


@pytest.mark.parametrize("case", CASES, ids=str)
def test_slices_along_the_dimensions_of_a_case_are_exact_and_others_are_refused(
    case: Case,
) -> None:
    for seed in SEEDS:
        node = node_of(case, Draw(seed))
        output = node.meta["val"]
        all_dims = range(tensors(output)[0].ndim)
        assert tuple(dim for dim in all_dims if sources(node, dim) is not None) == case.dims
        for dim in case.dims:
            assert_slices(node, dim, output, value_of, seed)


def test_every_operator_of_the_table_has_a_case_that_is_sliced() -> None:
    sliced = {getattr(case.target, "overloadpacket", case.target) for case in CASES if case.dims}
    tested_on_models = {operator.getitem}
    without_values = {
        aten.empty,
        aten.empty_like,
        aten.new_empty,
    }  # their memory is not initialised
    missing = set(TABLE) - sliced - tested_on_models - without_values
    assert [str(entry) for entry in missing] == []


def test_slice_of_an_empty_tensor_is_an_empty_tensor_of_its_rows() -> None:
    """diffusers' eager attention adds its scores to one."""
    graph = fx.Graph()
    empty = graph.call_function(aten.empty.memory_format, ([2, 6, 5],))
    empty.meta["val"] = torch.empty(2, 6, 5)
    assert sources(empty, 1) == ()
    slice_graph = fx.Graph()
    slice_graph.output(emit(slice_graph, empty, 1, (2, 5), empty.args, empty.kwargs))
    rows = fx.Interpreter(torch.nn.Module(), graph=slice_graph).run()
    assert rows.shape == (2, 3, 5)
