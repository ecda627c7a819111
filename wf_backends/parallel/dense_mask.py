"""A dense mask as slices: which of a mask's pairs are seen, in the words of attention.

Shapes: b batch, h heads, S queries, S' keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from wf_backends.parallel.sharding import SliceWords
from wf_backends.schedule import Range

HIDDEN = -1e4
"""Additive masks hide a key by this or less; what lies between it and 0 is a bias, and no mask."""
Steps = tuple[int, int]
"""How the (first key, last key) that a query sees move on from one query to the next."""
TYPES: Mapping[Steps | None, str] = MappingProxyType(
    {
        None: "full",  # one query
        (0, 0): "full",
        (0, 1): "causal",
        (1, 0): "inverse_causal",
        (1, 1): "bicausal",
    }
)


class _Run(NamedTuple):
    """Consecutive queries, of which each sees a range of keys that moves on by `steps`."""

    start: int
    stop: int
    first: Range
    last: Range
    steps: Steps | None = None

    def longer(self, keys: Range) -> _Run | None:
        """With the next query, if it goes on so."""
        steps = keys[0] - self.last[0], keys[1] - self.last[1]
        if steps not in TYPES or self.steps not in (None, steps):
            return None
        return _Run(self.start, self.stop + 1, self.first, keys, steps)


def slices_of_mask(mask: Tensor) -> SliceWords:
    """`q_ranges`, `k_ranges` and `attn_mask_types` that say what a dense mask says.

    It is read on the host, and takes time for every query: make it once a batch.

    Args:
        mask: (S, S'), or (b or 1, h or 1, S, S'), the same for all samples and heads. bool
            (True = seen), or floating as it is added to scores (0 = seen, `HIDDEN` or less = not).

    Raises:
        ValueError: if samples or heads differ, a value is a bias, or no query sees a key.
    """
    if mask.dim() not in (2, 4):
        raise ValueError(f"mask must be (S, S') or (b, h, S, S'), got {tuple(mask.shape)}")
    if mask.dtype != torch.bool and bool(((mask > HIDDEN) & (mask != 0)).any()):
        raise ValueError(
            f"mask must be bool, or 0 where a key is seen and at most {HIDDEN:g} where it is not, "
            "got other values: a bias is no mask"
        )
    seen = (mask if mask.dtype == torch.bool else mask == 0).view(-1, *mask.shape[-2:])
    if bool((seen != seen[:1]).any()):
        raise ValueError(
            f"mask {tuple(mask.shape)} differs between samples or heads, and slices hold for all: "
            "take a batch of one sample"
        )
    runs = _runs(_ranges(seen[0].cpu()))
    if not runs:
        raise ValueError(f"mask {tuple(mask.shape)} lets no query see a key")
    return {
        "q_ranges": [(run.start, run.stop) for run in runs],
        "k_ranges": [(run.first[0], run.last[1]) for run in runs],
        "attn_mask_types": [TYPES[run.steps] for run in runs],
    }


def _ranges(seen: Tensor) -> list[list[Range]]:
    """The ranges of keys that each query sees; seen (S, S')."""
    outside = seen.new_zeros(len(seen), 1).int()
    changes = seen.int().diff(dim=1, prepend=outside, append=outside)
    found: list[list[Range]] = [[] for _ in seen]
    starts, stops = ((changes == sign).nonzero().tolist() for sign in (1, -1))
    for (query, start), (_, stop) in zip(starts, stops, strict=True):
        found[query].append((start, stop))
    return found


def _runs(queries: Sequence[Sequence[Range]]) -> list[_Run]:
    """The queries' ranges of keys in as long runs as they make, one query after the other."""
    done, going = list[_Run](), list[_Run]()
    for query, ranges in enumerate(queries):
        if len(going) != len(ranges):
            done, going = done + going, []
        longer = [run.longer(keys) for run, keys in zip(going, ranges, strict=False)]
        done += [run for run, one in zip(going, longer, strict=True) if one is None]
        begun = [_Run(query, query + 1, keys, keys) for keys in ranges]
        going = [one or new for one, new in zip_longest(longer, begun)]
    return done + going
