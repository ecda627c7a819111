"""Masks from the arguments of flash-attn: causal, window_size and cu_seqlens."""

from __future__ import annotations

from math import inf

import pytest

from wf_backends.schedule.mask import CAUSAL, FULL, Band, Mask, make_mask


@pytest.mark.parametrize(
    ("arguments", "expected"),
    (
        ({}, Mask(FULL)),
        ({"causal": True}, Mask(CAUSAL)),
        ({"causal": True, "window_size": (4, 4)}, Mask(Band(4, 0))),
        ({"window_size": (-1, 3)}, Mask(Band(inf, 3))),
    ),
)
def test_causal_and_a_window_become_one_band(arguments, expected):
    assert make_mask(**arguments) == expected


def test_cu_seqlens_are_the_borders_of_documents():
    assert make_mask(cu_seqlens=[0, 3, 8], seqlen=8).documents(8) == ((0, 3), (3, 8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ({"window_size": (-2, 0)}, r"window_size must be \(left, right\).*got \(-2, 0\)"),
        ({"window_size": (1,)}, "window_size"),
        ({"window_size": (1.5, 0)}, "window_size"),
        ({"cu_seqlens": [0, 5], "seqlen": 8}, "must end at the sequence length 8, got 5"),
        ({"cu_seqlens": [1, 8]}, r"0 = c0 < c1 < ... = S, got \(1, 8\)"),
        ({"cu_seqlens": [0, 4, 4, 8]}, "cu_seqlens must be 0 = c0"),
        ({"cu_seqlens": [0]}, "cu_seqlens must be 0 = c0"),
    ),
)
def test_a_malformed_mask_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_mask(**arguments)
