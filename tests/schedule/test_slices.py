"""Slices of a mask: the (query, key) pairs that they let through, and refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dense import visible
from tests.slices import SEQLEN, SLICES, drawn_slices, sees, sliced, window_with_sinks
from wf_backends.lowering.areas import mask_area
from wf_backends.schedule.mask import Mask, make_mask
from wf_backends.schedule.slices import TYPES, Slice


def seen_pairs(slice_lists):
    """[query][key] -> whether the query sees the key, from the meaning of the types in words."""
    return [[sees(slice_lists, query, key) for key in range(SEQLEN)] for query in range(SEQLEN)]


@pytest.mark.parametrize("name", SLICES)
def test_slices_let_through_what_their_types_say(name):
    mask, expected = make_mask(**SLICES[name]), seen_pairs(SLICES[name])
    assert visible(mask, SEQLEN, SEQLEN).tolist() == expected
    assert mask_area(mask, SEQLEN) == sum(map(sum, expected))


@given(drawn_slices())
def test_drawn_slices_let_through_what_their_types_say(slice_lists):
    mask, expected = make_mask(**slice_lists), seen_pairs(slice_lists)
    assert visible(mask, SEQLEN, SEQLEN).tolist() == expected
    assert mask_area(mask, SEQLEN) == sum(map(sum, expected))


def test_four_slices_are_a_window_with_sinks():
    expected = [[k <= q and (q - k <= 6 or k < 3) for k in range(SEQLEN)] for q in range(SEQLEN)]
    assert seen_pairs(window_with_sinks(6, 3)) == expected


small_ranges = st.tuples(st.integers(0, 8), st.integers(1, 6)).map(
    lambda start_and_length: (start_and_length[0], sum(start_and_length))
)
small_slices = st.tuples(small_ranges, small_ranges, st.sampled_from(sorted(TYPES)))


@settings(max_examples=200)
@given(small_slices, small_slices)
def test_two_slices_overlap_if_a_query_sees_a_key_in_both(a, b):
    lists_a, lists_b = (sliced((*q, *k, mask_type)) for q, k, mask_type in (a, b))
    expected = any(
        sees(lists_a, query, key) and sees(lists_b, query, key)
        for query in range(14)
        for key in range(14)
    )
    slice_a, slice_b = (Slice(q, k, *TYPES[mask_type](q, k)) for q, k, mask_type in (a, b))
    assert slice_a.overlaps(slice_b) == slice_b.overlaps(slice_a) == expected


def test_slices_that_let_nothing_through_are_left_out():
    slice_lists = sliced((0, 9, 0, 3, "bicausal"), (0, 4, 4, 6, "full"))
    assert make_mask(**slice_lists) == Mask(slices=(Slice((0, 4), (4, 6)),))


@pytest.mark.parametrize(
    ("slice_lists", "message"),
    (
        (
            sliced((0, 8, 0, 8, "causal"), (4, 9, 2, 5, "full")),
            r"slice 0 \(queries \(0, 8\), keys \(0, 8\), causal\) and slice 1 \(queries \(4, 9\), "
            r"keys \(2, 5\), full\) hold the same",
        ),
        (sliced((0, 8, 5, 5, "full")), r"k_ranges\[0\] must be 0 <= start < stop, got \(5, 5\)"),
        (sliced((7, 3, 0, 5, "full")), r"q_ranges\[0\] must be 0 <= start < stop, got \(7, 3\)"),
        (sliced((-1, 3, 0, 5, "full")), r"q_ranges\[0\] must be 0 <= start"),
        (sliced((0, 3, 0, 5, "casual")), r"attn_mask_types.*got 'casual'; did you mean 'causal'\?"),
        (sliced((0, 3, 0, 5, [])), r"attn_mask_types must be of .*got \[\]"),
        (sliced((0, 3.5, 0, 5, "full")), r"q_ranges\[0\] must be \(start, stop\)"),
        (sliced() | {"q_ranges": [(0, 1)]}, r"one entry per slice, got \(1, 0, 0\)"),
        (sliced(), "no query sees a key"),
        (
            sliced((0, 3, 0, 5, "full")) | {"q_ranges": torch.tensor([[0, 3]])},
            r"q_ranges must be host integers; pass q_ranges.tolist\(\)",
        ),
        (
            sliced((0, 3, 0, 5, "full")) | {"k_ranges": np.array([[0, 5]])},
            "k_ranges must be a list",
        ),
        (sliced((0, 3, 0, 5, "full")) | {"attn_mask_types": "full"}, "must be a list"),
        (sliced((0, 3, 0, 5, "full")) | {"q_ranges": [(0, 1, 2)]}, r"must be \(start, stop\)"),
        (sliced((0, 3, 0, 5, "full")) | {"k_ranges": None}, r"go together: \['k_ranges'\] missing"),
        (sliced((0, 3, 0, 5, "full")) | {"causal": True}, r"leave \['causal'\] out"),
        (sliced((0, 3, 0, 5, "full")) | {"window_size": (3, 0)}, r"leave \['window_size'\] out"),
        (sliced((0, 3, 0, 5, "full")) | {"cu_seqlens": (0, 5)}, r"leave \['cu_seqlens'\] out"),
    ),
)
def test_malformed_slices_are_refused(slice_lists, message):
    with pytest.raises(ValueError, match=message):
        make_mask(**slice_lists)
