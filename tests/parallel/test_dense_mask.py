"""slices_of_mask: slices that let the same pairs through as a dense mask, and few of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.slices import SEQLEN, SLICES, drawn_slices, sees
from wf_backends.parallel import slices_of_mask
from wf_backends.schedule import make_mask


def dense(slices, num_queries=SEQLEN, num_keys=SEQLEN):
    """(queries, keys) bool."""
    return torch.tensor(
        [[sees(slices, query, key) for key in range(num_keys)] for query in range(num_queries)]
    )


@pytest.mark.parametrize("name", SLICES)
def test_masks_of_models_become_at_most_two_slices_more_than_written_by_hand(name):
    mask = dense(SLICES[name])
    slices = slices_of_mask(mask)
    assert torch.equal(dense(slices), mask)
    assert len(slices["q_ranges"]) <= len(SLICES[name]["q_ranges"]) + 2
    make_mask(**slices)  # raises unless they are disjoint


@given(drawn_slices())
def test_drawn_slices_let_the_same_pairs_through(drawn):
    mask = dense(drawn)
    assume(mask.any())
    slices = slices_of_mask(mask)
    assert torch.equal(dense(slices), mask)
    make_mask(**slices)  # raises unless they are disjoint


@given(st.integers(0, 2**32 - 1))
def test_random_pairs_are_the_pairs_of_the_slices(seed):
    """9 queries, 13 keys; at least one pair, since an empty mask is refused."""
    mask = torch.rand(9, 13, generator=torch.Generator().manual_seed(seed)) < 0.5
    mask[0, 0] = True
    slices = slices_of_mask(mask)
    assert torch.equal(dense(slices, 9, 13), mask)
    make_mask(**slices)  # raises unless they are disjoint


def test_additive_mask_of_equal_samples_is_the_bool_mask():
    mask = dense(SLICES["prefix_lm"])
    additive = torch.zeros(3, 1, SEQLEN, SEQLEN).masked_fill(~mask, torch.finfo(torch.float32).min)
    assert slices_of_mask(additive) == slices_of_mask(mask) == SLICES["prefix_lm"]


def test_mask_of_two_samples_may_be_expanded_to_heads():
    mask = dense(SLICES["prefix_lm"])
    expanded = mask.repeat(2, 1, 1, 1).expand(2, 4, -1, -1)
    assert slices_of_mask(expanded) == slices_of_mask(mask)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(4), r"got \(4,\)"),
        (torch.full((4, 4), -0.5), "a bias is no mask"),
        (torch.tensor([[0.0, torch.nan], [0.0, 0.0]]), "a bias is no mask"),
        (torch.zeros(4, 4, dtype=torch.bool), "lets no query see a key"),
        (torch.stack((torch.ones(4, 4), torch.eye(4)))[:, None] != 0, "batch of one sample"),
    ],
)
def test_what_is_no_mask_of_one_sample_is_refused(mask, message):
    with pytest.raises(ValueError, match=message):
        slices_of_mask(mask)
