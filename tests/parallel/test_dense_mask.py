"""A dense mask as slices says what the mask says, in few slices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.slices import SEQLEN, SLICES, drawn_slices, sees
from wf_backends.parallel import slices_of_mask
from wf_backends.schedule import make_mask


def dense(slices, seqlen=SEQLEN):
    pairs = [[sees(slices, query, key) for key in range(seqlen)] for query in range(seqlen)]
    return torch.tensor(pairs)


@pytest.mark.parametrize("name", SLICES)
def test_masks_of_models(name):
    """As many slices as a person writes, and those that a query's first or last key begins."""
    found = slices_of_mask(dense(SLICES[name]))
    assert torch.equal(dense(found), dense(SLICES[name]))
    assert len(found["q_ranges"]) <= len(SLICES[name]["q_ranges"]) + 2
    make_mask(**found)  # disjoint


@given(drawn_slices())
def test_drawn_slices(slices):
    if not dense(slices).any():
        return
    found = slices_of_mask(dense(slices))
    assert torch.equal(dense(found), dense(slices))
    make_mask(**found)


@given(st.integers(0, 2**32 - 1))
def test_drawn_pairs(seed):
    seen = torch.rand(9, 13, generator=torch.Generator().manual_seed(seed)) < 0.5
    seen[0, 0] = True
    found = slices_of_mask(seen)
    pairs = [[sees(found, query, key) for key in range(13)] for query in range(9)]
    assert torch.equal(torch.tensor(pairs), seen)
    make_mask(**found)


def test_additive_masks_of_several_samples():
    seen = dense(SLICES["prefix_lm"])
    added = torch.zeros(3, 1, SEQLEN, SEQLEN).masked_fill(~seen, torch.finfo(torch.float32).min)
    assert slices_of_mask(added) == slices_of_mask(seen) == SLICES["prefix_lm"]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(4), r"got \(4,\)"),
        (torch.full((4, 4), -0.5), "a bias is no mask"),
        (torch.zeros(4, 4, dtype=torch.bool), "lets no query see a key"),
        (torch.stack((torch.ones(4, 4), torch.eye(4)))[:, None] != 0, "batch of one sample"),
    ],
)
def test_refusals(mask, message):
    with pytest.raises(ValueError, match=message):
        slices_of_mask(mask)
