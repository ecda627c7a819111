"""The numbers that dropout of attention draws: right in distribution, the same however split."""

from __future__ import annotations

import pytest
import torch

from wf_backends.kernels import Dropout

P, HEADS, BATCH, LENGTH = 0.3, 8, 4, 256
PLACES = torch.arange(LENGTH)


def kept(seed=0, heads=HEADS, p=P):
    return Dropout(p, seed, (0, heads)).keep_mask(BATCH, PLACES, PLACES)


def correlation(a, b):
    """Of two equally large sets of draws, in standard deviations of independent ones."""
    a, b = (x.double().flatten() - (1 - P) for x in (a, b))
    return (a * b).mean().item() / (P * (1 - P)) * a.numel() ** 0.5


@pytest.mark.parametrize("p", (0.01, 0.1, 0.5, 0.9))
def test_as_many_are_kept_as_the_probability_says(p):
    drawn = kept(p=p).double()
    error = (p * (1 - p) / drawn.numel()) ** 0.5
    assert abs(drawn.mean().item() - (1 - p)) < 4 * error
    for dims in ((0, 1, 2), (0, 1, 3), (1, 2, 3), (0, 2, 3)):  # of each key, row, sample, head
        means = drawn.mean(dims)
        spread = (p * (1 - p) * len(means) / drawn.numel()) ** 0.5
        assert (means - (1 - p)).abs().max() < 5 * spread


def test_neighbours_are_independent():
    drawn = kept()
    for dim in range(4):
        for apart in (1, 2, 3):
            rest = drawn.shape[dim] - apart
            pair = drawn.narrow(dim, 0, rest), drawn.narrow(dim, apart, rest)
            assert abs(correlation(*pair)) < 4.5, (dim, apart)
    above = torch.triu_indices(LENGTH, LENGTH, 1)
    mirrored = drawn[..., above[0], above[1]], drawn[..., above[1], above[0]]
    assert abs(correlation(*mirrored)) < 4.5
    assert abs(correlation(drawn[:, :4], drawn[:, 4:])) < 4.5


def test_seeds_are_independent_even_where_they_follow_one_another():
    """A layer's seed is often that of the layer before plus one."""
    first, second = kept(5), kept(6)
    assert abs(correlation(first, second)) < 4.5
    assert abs(correlation(first[1:], second[:-1])) < 4.5  # seed + sample is no one number
    assert abs(correlation(first[:, 1:], second[:, :-1])) < 4.5


def test_a_part_is_a_part_of_the_whole():
    whole = kept(3)
    rows, keys = PLACES[40:77], torch.cat((PLACES[:9], PLACES[200:230]))
    part = Dropout(P, 3, (0, HEADS)).of_heads((4, 8)).of_heads((1, 3)).keep_mask(2, rows, keys)
    assert torch.equal(part, whole[:2, 5:7][:, :, 40:77][..., keys])


def test_a_seed_may_live_on_a_device():
    assert torch.equal(kept(torch.tensor([9])), kept(9))
    assert torch.equal(kept((1 << 63) - 1), kept(torch.tensor([(1 << 63) - 1])))
