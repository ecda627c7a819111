"""Converts a dense mask into slices, as `SequenceParallel.attention` takes them.

Shapes: b batch, h heads, S queries, S' keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType
from typing import NamedTuple

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


class _GrowingSlice(NamedTuple):
    """A slice of the consecutive queries start to stop, with the key ranges of both ends."""

    start: int
    stop: int
    first_keys: Range
    last_keys: Range
    slopes: Slopes | None = None  # None for a single query

    def extended(self, keys: Range) -> _GrowingSlice | None:
        """The slice with one more query, which sees `keys`; None if that is not one slice."""
        slopes = keys[0] - self.last_keys[0], keys[1] - self.last_keys[1]
        if slopes not in TYPES or self.slopes not in (None, slopes):
            return None
        return _GrowingSlice(self.start, self.stop + 1, self.first_keys, keys, slopes)


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
    slices = _slices(_key_ranges(visible[0].cpu()))
    if not slices:
        raise ValueError(f"mask {tuple(mask.shape)} lets no query see a key")
    return {
        "q_ranges": [(slice_.start, slice_.stop) for slice_ in slices],
        "k_ranges": [(slice_.first_keys[0], slice_.last_keys[1]) for slice_ in slices],
        "attn_mask_types": [TYPES[slice_.slopes] for slice_ in slices],
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


def _slices(key_ranges: Sequence[Sequence[Range]]) -> list[_GrowingSlice]:
    """The slices with the most queries, found query by query; key_ranges as by `_key_ranges`.

    A query extends the last one's slices, range by range, if both have equally many ranges.
    """
    finished, current = list[_GrowingSlice](), list[_GrowingSlice]()
    for query, ranges in enumerate(key_ranges):
        if len(current) != len(ranges):
            finished += current
            current = []
        slices: list[_GrowingSlice] = []
        for slice_, keys in zip_longest(current, ranges):
            extended = slice_.extended(keys) if slice_ else None
            if slice_ and not extended:
                finished.append(slice_)
            slices.append(extended or _GrowingSlice(query, query + 1, keys, keys))
        current = slices
    return finished + current
