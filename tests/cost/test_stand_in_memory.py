"""What stands in for outputs that are not at home is memory of the backward, and of it alone."""

from __future__ import annotations

from wf_backends.cost.exact_cost import buffer_bytes
from wf_backends.lowering.message_bytes import Shape, backward_row_bytes, forward_row_bytes

SHAPE = Shape(batch=2, heads=4, kv_heads=2, head_dim=16, itemsize=2)
OUTPUT = 2 * 4 * 16 * 2  # bytes of one row, in the queries' dtype
QUERY = 2 * OUTPUT + 2 * 2 * 4 * 4  # q, dout and [lse, delta]
KEY, KEY_GRAD = 2 * 2 * 2 * 16 * 2, 2 * 2 * 2 * 16 * 4
QUERY_GRAD = 2 * 4 * 16 * 4


def test_queries_that_stay_have_their_output_at_home_and_stand_ins_where_gathered():
    rows = backward_row_bytes(SHAPE)
    keys = 2 * 5 * (KEY + KEY_GRAD) + 5 * KEY_GRAD
    assert buffer_bytes((5, 5), (5, 5), rows) == 5 * (QUERY + QUERY_GRAD) + keys
    gathered = 15 * (QUERY + QUERY_GRAD + OUTPUT) + 5 * QUERY_GRAD
    assert buffer_bytes((5, 5), (15, 5), rows) == gathered + keys


def test_queries_that_walk_have_stand_ins_for_those_that_are_held():
    rows = backward_row_bytes(SHAPE, queries_walk=True)
    queries = 2 * 5 * (QUERY + QUERY_GRAD) + 5 * OUTPUT + 5 * QUERY_GRAD
    assert buffer_bytes((5, 5), (5, 5), rows) == 5 * (KEY + KEY_GRAD) + queries


def test_a_pass_of_one_step_has_no_keys_that_arrive():
    rows = backward_row_bytes(SHAPE)
    once = 5 * (QUERY + QUERY_GRAD) + 5 * (KEY + KEY_GRAD) + 5 * KEY_GRAD
    assert buffer_bytes((5, 5), (5, 5), rows, arrive=False) == once


def test_a_forward_has_none():
    rows = forward_row_bytes(SHAPE)
    assert rows.stay.output == rows.walk.output == 0
