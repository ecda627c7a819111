"""Bytes of a pass's buffers. The backward also holds surrogates of the outputs of other owners'
queries (runtime/surrogate_out.py)."""

from __future__ import annotations

from wf_backends.cost.exact_cost import buffer_bytes
from wf_backends.lowering.message_bytes import Shape, backward_row_bytes, forward_row_bytes

SHAPE = Shape(batch=2, heads=4, kv_heads=2, head_dim=16, itemsize=2)
OUTPUT = 2 * 4 * 16 * 2  # bytes of one row, in the queries' dtype
QUERY = 2 * OUTPUT + 2 * 2 * 4 * 4  # q, dout and [lse, delta]
KEY, KEY_GRAD = 2 * 2 * 2 * 16 * 2, 2 * 2 * 2 * 16 * 4
QUERY_GRAD = 2 * 4 * 16 * 4


def test_gathered_queries_that_stay_have_surrogate_outputs():
    """Keys walk: those of a step and the next ones, and gradients of the rank's own keys."""
    row_bytes = backward_row_bytes(SHAPE)
    keys = 2 * 5 * (KEY + KEY_GRAD) + 5 * KEY_GRAD
    own_queries = 5 * (QUERY + QUERY_GRAD)
    assert buffer_bytes((5, 5), (5, 5), row_bytes) == own_queries + keys
    gathered_queries = 15 * (QUERY + QUERY_GRAD + OUTPUT) + 5 * QUERY_GRAD
    assert buffer_bytes((5, 5), (15, 5), row_bytes) == gathered_queries + keys


def test_queries_that_walk_have_surrogate_outputs_in_the_step_that_computes():
    row_bytes = backward_row_bytes(SHAPE, queries_walk=True)
    queries = 2 * 5 * (QUERY + QUERY_GRAD) + 5 * OUTPUT + 5 * QUERY_GRAD
    assert buffer_bytes((5, 5), (5, 5), row_bytes) == 5 * (KEY + KEY_GRAD) + queries


def test_a_pass_of_one_step_has_no_buffer_for_keys_that_arrive():
    queries, keys = 5 * (QUERY + QUERY_GRAD), 5 * (KEY + KEY_GRAD) + 5 * KEY_GRAD
    row_bytes = backward_row_bytes(SHAPE)
    assert buffer_bytes((5, 5), (5, 5), row_bytes, arrive=False) == queries + keys


def test_a_forward_has_no_surrogate_outputs():
    row_bytes = forward_row_bytes(SHAPE)
    assert row_bytes.stay.output == row_bytes.walk.output == 0
