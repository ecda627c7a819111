"""Converts a dense mask into slices, as `SequenceParallel.attention` takes them.

Shapes: b batch, h heads, S queries, S' keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from types import MappingProxyType

import torch
from torch import Tensor

from wf_backends.parallel.sequence_parallel import SliceArguments
from wf_backends.schedule import Range

HIDDEN = -1e4
"""Additive masks hide a key by this value or less; values between it and 0 are a bias."""
Slopes = tuple[int, int]
"""From one query to the next: by how much the (start, stop) of its range of keys increases."""
TYPES: Mapping[Slopes | None, str] = MappingProxyType(
    {
        None: "full",  # one query
        (0, 0): "full",
        (0, 1): "causal",
        (1, 0): "inverse_causal",
        (1, 1): "bicausal",
    }
)


def slices_of_mask(mask: Tensor) -> SliceArguments:
    """The `q_ranges`, `k_ranges` and `attn_mask_types` of a dense mask.

    The mask is read on the host, query by query: convert it once per batch.

    Args:
        mask: (S, S'), or (b or 1, h or 1, S, S'), the same for all samples and heads. bool (True =
            visible), or floats that are added to scores (0 = visible, `HIDDEN` or less = hidden).

    Raises:
        ValueError: if samples or heads differ, a value is a bias, or no query sees a key.
    """
    if mask.dim() not in (2, 4):
        raise ValueError(f"mask must be (S, S') or (b, h, S, S'), got {tuple(mask.shape)}")
    if mask.dtype != torch.bool and not bool(((mask <= HIDDEN) | (mask == 0)).all()):
        raise ValueError(
            f"mask must be bool, or 0 where a key is seen and at most {HIDDEN:g} where it is not, "
            "got other values: a bias is no mask"
        )
    visible = (mask if mask.dtype == torch.bool else mask == 0).reshape(-1, *mask.shape[-2:])
    if bool((visible != visible[:1]).any()):
        raise ValueError(
            f"mask {tuple(mask.shape)} differs between samples or heads, and slices hold for all: "
            "take a batch of one sample"
        )
    slices = [*_slices(_key_ranges(visible[0].cpu()))]
    if not slices:
        raise ValueError(f"mask {tuple(mask.shape)} lets no query see a key")
    return {
        "q_ranges": [queries for queries, _, _ in slices],
        "k_ranges": [keys for _, keys, _ in slices],
        "attn_mask_types": [type_ for _, _, type_ in slices],
    }


def _key_ranges(visible: Tensor) -> list[list[Range]]:
    """For each query the ranges of keys that it sees; visible (S, S') bool."""
    hidden_column = visible.new_zeros(len(visible), 1).int()
    changes = visible.int().diff(dim=1, prepend=hidden_column, append=hidden_column)
    starts, stops = ((changes == sign).nonzero().tolist() for sign in (1, -1))
    ranges: list[list[Range]] = [[] for _ in visible]
    for (query, start), (_, stop) in zip(starts, stops, strict=True):
        ranges[query].append((start, stop))
    return ranges


def _slices(key_ranges: Sequence[Sequence[Range]]) -> Iterator[tuple[Range, Range, str]]:
    """(queries, keys, type) of each slice, as long as they get; key_ranges as by `_key_ranges`.

    Consecutive queries with equally many ranges share slices, one for each range.
    """
    for _, run in groupby(enumerate(key_ranges), lambda query: len(query[1])):
        queries, ranges_by_query = zip(*run, strict=True)
        for ranges in zip(*ranges_by_query, strict=True):
            for start, stop, slopes in _even_parts(ranges):
                keys = ranges[start][0], ranges[stop - 1][1]
                yield (queries[start], queries[stop - 1] + 1), keys, TYPES[slopes]


def _even_parts(ranges: Sequence[Range]) -> Iterator[tuple[int, int, Slopes | None]]:
    """(start, stop, slopes) of the parts of a list of ranges in which both ends rise evenly."""
    start, slopes = 0, None
    for i, (last, keys) in enumerate(pairwise(ranges), start=1):
        step = keys[0] - last[0], keys[1] - last[1]
        if step in TYPES and slopes in (None, step):
            slopes = step
        else:
            yield start, i, slopes
            start, slopes = i, None
    yield start, len(ranges), slopes
