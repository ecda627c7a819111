"""What documents a packed sequence is planned for: not its own, but of a kind with them.

Pure: standard library only, and the same on every rank. A plan is chosen once for every kind, of
which a training run meets a few. Documents of one length would be a bad kind: they fit their ranks
too well, so that no route seems to send anything.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from random import Random

LENGTHS = (
    *(1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 8, 8, 9, 10, 10, 11, 12, 13, 14, 16),
    *(17, 19, 21, 23, 26, 29, 34, 41, 53, 86),
)
"""Quantiles of a log-normal distribution with sigma = 1, in tenths of its median."""
MIN_HALVINGS = 2
"""Halvings of the sequence down to the documents' mean length: with fewer it matters where each
document begins."""
SEED = 3
"""Which draw: picked once, of eight, for few bad plans; benchmarks/kinds.py judges it on others."""
MAX_PARTS_OF_A_SHARD = 8
"""Parts of a shard, down to which lengths tell kinds apart: shorter documents hardly ever leave
their rank."""


def typical_documents(
    cu_seqlens: tuple[int, ...], seqlen: int, size: int, fewest: int = MIN_HALVINGS
) -> tuple[int, ...] | None:
    """Borders of documents drawn so that their mean length, as tokens see it, is the given ones'.

    Lengths count to the next power of two.

    Args:
        cu_seqlens: the borders of the real documents. seqlen: where the result ends, which need
            not be where the real ones do. size: the ranks. fewest: see MIN_HALVINGS.

    Returns:
        None where so few of these documents fill the sequence that no others stand for them.
    """
    squares = sum((stop - start) ** 2 for start, stop in pairwise(cu_seqlens))
    times = (seqlen * cu_seqlens[-1]) ** 2 // squares**2  # (seqlen / mean)**2
    halvings = times.bit_length() // 2  # log2(seqlen / mean), rounded
    if halvings < fewest:
        return None
    return draw_documents(seqlen, min(halvings, (MAX_PARTS_OF_A_SHARD * size).bit_length() - 1))


@lru_cache(maxsize=16)
def draw_documents(seqlen: int, halvings: int) -> tuple[int, ...]:
    """Borders of documents whose mean length, as tokens see it, is seqlen / 2**halvings."""
    draw, ends, whole, squares = Random(SEED), list[int](), 0, 0
    while whole**2 <= squares << halvings:
        length = LENGTHS[int(draw.random() * len(LENGTHS))]
        whole, squares = whole + length, squares + length**2
        ends.append(whole)
    return tuple(sorted({0, *(seqlen * end // whole for end in ends)}))
