"""The mask of attention dropout: independent draws of the right probability, the same however the
heads and positions are split. Seeds are fixed: the bounds of 4 to 5 standard deviations hold or
fail on every run alike."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from wf_backends.kernels import Dropout, Scores
from wf_backends.kernels.reference import ReferenceKernel
from wf_backends.schedule.mask import CAUSAL

P, HEADS, BATCH, LENGTH = 0.3, 8, 4, 256
POSITIONS = torch.arange(LENGTH)
DIMS = {"sample": 0, "head": 1, "row": 2, "key": 3}


@cache
def keep_mask(seed=0, p=P):
    """(samples, heads, rows, keys) bool: True where a weight is kept."""
    return Dropout(p, seed, (0, HEADS)).keep_mask(BATCH, POSITIONS, POSITIONS)


def correlation(a, b):
    """Of two masks of one shape, in standard deviations of independent ones."""
    a, b = (x.double().flatten() - (1 - P) for x in (a, b))
    return (a * b).mean().item() / (P * (1 - P)) * a.numel() ** 0.5


def deviation(means, p, num_draws):
    """The largest |mean - (1 - p)|, in standard deviations of the mean of so many draws."""
    return ((means - (1 - p)).abs().max() / (p * (1 - p) / num_draws) ** 0.5).item()


@pytest.mark.parametrize("p", (0.01, 0.1, 0.5, 0.9))
def test_the_share_of_kept_weights_is_one_minus_p(p):
    mask = keep_mask(p=p).double()
    assert deviation(mask.mean(), p, mask.numel()) < 4


@pytest.mark.parametrize("p", (0.01, 0.1, 0.5, 0.9))
@pytest.mark.parametrize("dim", DIMS)
def test_the_share_is_the_same_for_each_sample_head_row_and_key(p, dim):
    mask = keep_mask(p=p).double()
    other_dims = [d for d in range(4) if d != DIMS[dim]]
    means = mask.mean(other_dims)
    assert deviation(means, p, mask.numel() / len(means)) < 5


@pytest.mark.parametrize("distance", (1, 2, 3))
@pytest.mark.parametrize("dim", DIMS)
def test_neighbours_are_independent(dim, distance):
    mask = keep_mask()
    num_pairs = mask.shape[DIMS[dim]] - distance
    first = mask.narrow(DIMS[dim], 0, num_pairs)
    second = mask.narrow(DIMS[dim], distance, num_pairs)
    assert abs(correlation(first, second)) < 4.5


def test_rows_and_keys_are_not_interchangeable():
    mask, (i, j) = keep_mask(), torch.triu_indices(LENGTH, LENGTH, 1)
    assert abs(correlation(mask[..., i, j], mask[..., j, i])) < 4.5


def test_halves_of_the_heads_are_independent():
    mask = keep_mask()
    assert abs(correlation(mask[:, :4], mask[:, 4:])) < 4.5


def test_consecutive_seeds_are_independent():
    """A layer's seed is often that of the layer before plus one."""
    first, second = keep_mask(5), keep_mask(6)
    assert abs(correlation(first, second)) < 4.5
    assert abs(correlation(first[1:], second[:-1])) < 4.5  # seed and sample are not just added
    assert abs(correlation(first[:, 1:], second[:, :-1])) < 4.5  # nor are seed and head


def test_the_mask_of_some_heads_and_positions_is_cut_from_that_of_all():
    rows, keys = POSITIONS[40:77], torch.cat((POSITIONS[:9], POSITIONS[200:230]))
    heads_5_and_6 = Dropout(P, 3, (0, HEADS)).of_heads((4, 8)).of_heads((1, 3))
    expected = keep_mask(seed=3)[:2, 5:7][:, :, 40:77][..., keys]
    assert torch.equal(heads_5_and_6.keep_mask(2, rows, keys), expected)


@pytest.mark.parametrize("seed", (9, (1 << 63) - 1))
def test_a_seed_may_be_a_tensor(seed):
    assert torch.equal(keep_mask(torch.tensor([seed])), keep_mask(seed))


@pytest.fixture
def default_bfloat16():
    """As in a script that makes its model in bfloat16 and does not set the default back."""
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("default_bfloat16")
def test_kept_weights_are_scaled_exactly_whatever_torchs_default_dtype():
    rows = POSITIONS[:16]
    dropout = Dropout(P, 0, (0, 2))
    scores = Scores(0.5, dropout=dropout).at_positions(rows, rows)
    q, k, v = torch.randn(3, 1, 16, 2, 4, dtype=torch.float64)
    out, _ = ReferenceKernel().forward(q, k, v, scores, CAUSAL)
    x = 0.5 * torch.einsum("bihd,bjhd->bhij", q, k)
    weights = x.masked_fill(rows[:, None] < rows, -torch.inf).softmax(-1)
    kept = weights * dropout.keep_mask(1, rows, rows) / (1 - P)
    torch.testing.assert_close(out, torch.einsum("bhij,bjhd->bihd", kept, v), rtol=0, atol=1e-12)
