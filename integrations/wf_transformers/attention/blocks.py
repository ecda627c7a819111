"""Blocks of tokens that see each other in both directions, inside causal attention.

Such as the tokens of an image in Gemma 3, or a prefix in PaliGemma. A row sees what causal
attention shows it, and the later tokens of its block; a window hides earlier tokens of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import combinations, pairwise
from typing import Any

from wf_backends.schedule import Range

Block = tuple[Range, ...]
"""The ranges of one block, in order."""
Slices = list[tuple[Range, Range, str]]
"""(queries, keys, type), as `SequenceParallel.attention` takes them."""

BLOCKS = "wallfacer_blocks"
"""In a local batch: (tokens S, for each sample its blocks, whether only windows have these)."""


def masks_with_blocks(
    documents: Mapping[str, Any], window: tuple[int, int] | None
) -> list[dict[str, Any]]:
    """For each sample the arguments of `SequenceParallel.attention` that describe its mask.

    Args:
        documents: with `BLOCKS`, and "cu_seqlens" if there are documents, by sample or of all.
        window: (left, right) of the layer.
    """
    seqlen, samples, in_windows = documents[BLOCKS]
    samples = [()] * len(samples) if in_windows and window is None else samples
    borders = documents.get("cu_seqlens") or (0, seqlen)
    by_sample = borders if isinstance(borders[0], tuple) else [tuple(borders)] * len(samples)
    seen = seqlen if window is None else window[0] + 1
    masks = [_slices(x, blocks, seen) for x, blocks in zip(by_sample, samples, strict=True)]
    fields = ("q_ranges", "k_ranges", "attn_mask_types")
    others = {"causal": False, "window_size": (-1, -1)}
    return [others | dict(zip(fields, map(list, zip(*x, strict=True)), strict=True)) for x in masks]


@lru_cache(maxsize=64)
def _slices(borders: tuple[int, ...], blocks: tuple[Block, ...], seen: int) -> Slices:
    slices: Slices = []
    for start, stop in pairwise(borders):
        slices += _causal(start, stop, seen)
        for block in blocks:
            inside = [(max(a, start), min(b, stop)) for a, b in block]
            slices += _later([(a, b) for a, b in inside if a < b])
    return slices


def _causal(start: int, stop: int, seen: int) -> Slices:
    """Causal attention in a document, in which a row sees up to `seen` keys, with its own."""
    if stop - start <= seen:
        return [((start, stop), (start, stop), "causal")]
    first = start + seen - 1  # the first row that sees so many
    head: Slices = [((start, first), (start, first), "causal")] if first > start else []
    return [*head, ((first, stop), (start, stop), "bicausal")]


def _later(block: list[Range]) -> Slices:
    """The later tokens of a block."""
    own: Slices = [((a, b - 1), (a + 1, b), "inverse_causal") for a, b in block if b - a > 1]
    return [*own, *((a, b, "full") for a, b in combinations(block, 2))]
