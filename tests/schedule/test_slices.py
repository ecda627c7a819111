"""Slices of a mask: what they mean, and what is refused."""

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


def pairs(told, length=SEQLEN):
    return [[sees(told, query, key) for key in range(length)] for query in range(length)]


@pytest.mark.parametrize("name", SLICES)
def test_a_slice_means_what_its_type_says(name):
    mask = make_mask(**SLICES[name])
    assert visible(mask, SEQLEN, SEQLEN).tolist() == pairs(SLICES[name])
    assert mask_area(mask, SEQLEN) == sum(map(sum, pairs(SLICES[name])))


@given(drawn_slices())
def test_drawn_slices_mean_what_their_types_say(told):
    mask = make_mask(**told)
    assert visible(mask, SEQLEN, SEQLEN).tolist() == pairs(told)
    assert mask_area(mask, SEQLEN) == sum(map(sum, pairs(told)))


def test_a_window_with_sinks_as_slices():
    want = [[k <= q and (q - k <= 6 or k < 3) for k in range(SEQLEN)] for q in range(SEQLEN)]
    assert pairs(window_with_sinks(6, 3)) == want


edges = st.tuples(st.integers(0, 8), st.integers(1, 6)).map(lambda pair: (pair[0], sum(pair)))
slices = st.tuples(edges, edges, st.sampled_from(sorted(TYPES)))


@settings(max_examples=500)
@given(slices, slices)
def test_two_slices_overlap_where_some_query_sees_some_key_in_both(a, b):
    one, other = (sliced((*q, *k, kind)) for q, k, kind in (a, b))
    both = any(sees(one, q, k) and sees(other, q, k) for q in range(14) for k in range(14))
    built = [Slice(q, k, *TYPES[kind](q, k)) for q, k, kind in (a, b)]
    assert built[0].overlaps(built[1]) == built[1].overlaps(built[0]) == both


def test_slices_that_let_nothing_through_are_left_out():
    told = sliced((0, 9, 0, 3, "bicausal"), (0, 4, 4, 6, "full"))
    assert make_mask(**told) == Mask(slices=(Slice((0, 4), (4, 6)),))


@pytest.mark.parametrize(
    ("told", "says"),
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
        (sliced() | {"q_ranges": [(0, 1)]}, r"one entry a slice, got \(1, 0, 0\)"),
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
def test_malformed_slices_are_refused(told, says):
    with pytest.raises(ValueError, match=says):
        make_mask(**told)
