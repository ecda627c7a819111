"""How many (query, key) pairs a tile, a band or a mask lets through, without a loop over rows.

Pure: standard library only.
"""

from __future__ import annotations

from wf_backends.lowering.tiles import Tile
from wf_backends.schedule import FULL, Mask, Slice, size, span

BACKWARD_FLOPS = 2.5  # five matrix products for the forward's two (FlashAttention-2)


def tile_area(tile: Tile) -> int:
    """How many (row, key) pairs the tile's band lets through."""
    return band_area(size(tile.rows), size(tile.keys), tile.band.left, tile.band.right)


def wasted_area(tile: Tile, keys: float) -> float:
    """The pairs that a kernel, which goes by blocks, computes beside those.

    Args:
        keys: how many of a row's, where an edge of the band crosses the tile.
    """
    if not keys or not tile.band.edges:
        return 0.0
    rows, width = size(tile.rows), size(tile.keys)
    return min(rows * width - tile_area(tile), tile.band.edges * keys * min(rows, width))


def band_area(num_rows: int, num_keys: int, left: float, right: float) -> int:
    """The pairs with -left <= key - row <= right, without a loop over rows."""
    upto = _keys_before(num_rows, num_keys, right + 1)
    return upto - _keys_before(num_rows, num_keys, -left)


def _keys_before(num_rows: int, num_keys: int, offset: float) -> int:
    """The sum over rows of the keys before row + offset: 0, then rising by one, then all."""
    first = int(min(max(-offset, 0), num_rows))  # rows below see none
    full = int(min(max(num_keys - offset, first), num_rows))  # rows from here on see all
    if full == first:
        return (num_rows - full) * num_keys
    low, high = first + int(offset), full - 1 + int(offset)
    return (low + high) * (full - first) // 2 + (num_rows - full) * num_keys


def slice_area(one: Slice) -> int:
    """The (query, key) pairs that a slice lets through."""
    band = one.band.shift(one.k[0] - one.q[0])
    return band_area(span(one.q), span(one.k), band.left, band.right)


def mask_area(mask: Mask, seqlen: int) -> int:
    """The (query, key) pairs that a mask lets through."""
    if mask.slices is not None:
        return sum(map(slice_area, mask.slices))
    band = mask.band
    sizes = (stop - start for start, stop in mask.documents(seqlen))
    return sum(band_area(size, size, band.left, band.right) for size in sizes)


def unevenness(mask: Mask, seqlen: int, layout: str) -> float:
    """The scores of the rank that has most of them, beside the mean; documents are taken for even.

    Rows that see their whole window have most. Of two chunks, an early and a late one, no rows see
    a causal window of more than half the sequence whole: together they see a sequence.
    """
    band = mask.band
    if band == FULL or mask.cu_seqlens is not None:
        return 1.0
    in_pairs = layout != "contiguous" and 0 in (band.left, band.right)
    seen = min(band.left + band.right + 1, seqlen / 2 if in_pairs else seqlen)
    return max(1.0, seqlen * seen / mask_area(mask, seqlen))
