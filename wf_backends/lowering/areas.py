"""The number of (query, key) pairs that a tile, a band or a mask lets through, in closed form."""

from __future__ import annotations

from wf_backends.lowering.tiles import Tile
from wf_backends.schedule import FULL, Mask, Slice, range_length, size

BACKWARD_FLOPS = 2.5  # five matrix products for the forward's two (FlashAttention-2)


def tile_area(tile: Tile) -> int:
    """The number of (row, key) pairs that the tile's band lets through."""
    return band_area(size(tile.rows), size(tile.keys), tile.band.left, tile.band.right)


def computed_area(tile: Tile, hidden_keys: float) -> float:
    """The pairs that a kernel computes: also some that the band hides, since it works in blocks.

    Args:
        hidden_keys: those that are computed for a row, at each edge of the band in the tile.
    """
    rows, keys = size(tile.rows), size(tile.keys)
    return min(rows * keys, tile_area(tile) + tile.band.edges * hidden_keys * min(rows, keys))


def band_area(num_rows: int, num_keys: int, left: float, right: float) -> int:
    """The number of pairs with -left <= key - row <= right."""
    not_beyond_right = _keys_before(num_rows, num_keys, right + 1)
    return not_beyond_right - _keys_before(num_rows, num_keys, -left)


def _keys_before(num_rows: int, num_keys: int, offset: float) -> int:
    """The number of pairs with key < row + offset.

    No key in rows before `first`, `low` to `high` keys in the next rows, all keys from `full` on.
    """
    first = int(min(max(-offset, 0), num_rows))
    full = int(min(max(num_keys - offset, first), num_rows))
    if full == first:
        return (num_rows - full) * num_keys
    low, high = first + int(offset), full - 1 + int(offset)
    return (low + high) * (full - first) // 2 + (num_rows - full) * num_keys


def slice_area(slice_: Slice) -> int:
    """The number of (query, key) pairs that a slice lets through."""
    band = slice_.band.shift(slice_.k[0] - slice_.q[0])
    return band_area(range_length(slice_.q), range_length(slice_.k), band.left, band.right)


def mask_area(mask: Mask, seqlen: int) -> int:
    """The number of (query, key) pairs that a mask lets through."""
    if mask.slices is not None:
        return sum(map(slice_area, mask.slices))
    band = mask.band
    lengths = map(range_length, mask.documents(seqlen))
    return sum(band_area(length, length, band.left, band.right) for length in lengths)


def unevenness(mask: Mask, seqlen: int, layout: str) -> float:
    """Largest scores of a rank / mean scores, for a window on many ranks; 1 with documents.

    The busiest rank has rows that see their whole window. A causal zigzag rank has an early and a
    late chunk, which together see as many keys as the sequence has: half of it per row at most.
    """
    band = mask.band
    if band == FULL or mask.cu_seqlens is not None:
        return 1.0
    has_pairs_of_chunks = layout != "contiguous" and 0 in (band.left, band.right)
    max_keys = seqlen / 2 if has_pairs_of_chunks else seqlen
    keys_per_row = min(band.left + band.right + 1, max_keys)
    return max(1.0, seqlen * keys_per_row / mask_area(mask, seqlen))
