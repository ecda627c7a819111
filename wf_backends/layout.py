"""Which tokens a rank owns.

Pure: standard library only. A layout gives every rank its shard: the sorted ranges of global
positions whose rows it holds, in sequence order. Sequence lengths need not divide: chunks then
differ by one token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from types import MappingProxyType

from wf_backends.ranges import Range, Ranges, join, size
from wf_backends.suggest import nearest

Layout = tuple[Ranges, ...]  # rank -> its shard


def contiguous(num_ranks: int, seqlen: int) -> Layout:
    """Rank r owns chunk r of `num_ranks` chunks.

    Raises:
        ValueError: if there are fewer tokens than ranks.
    """
    return tuple((chunk,) for chunk in _chunks("contiguous", num_ranks, num_ranks, seqlen))


def zigzag(num_ranks: int, seqlen: int) -> Layout:
    """Rank r owns chunks r and 2P-1-r of 2P chunks: a causal mask then gives all the same work.

    Raises:
        ValueError: if there are fewer tokens than 2P chunks.

    Source: ring-flash-attention issue 2; PyTorch calls it "head-tail".
    """
    chunks = _chunks("zigzag", num_ranks, 2 * num_ranks, seqlen)
    return tuple(join((chunks[r], chunks[-1 - r])) for r in range(num_ranks))


LAYOUTS: Mapping[str, Callable[[int, int], Layout]] = MappingProxyType(
    {"contiguous": contiguous, "zigzag": zigzag}
)
CHUNKS_PER_RANK: Mapping[str, int] = MappingProxyType({"contiguous": 1, "zigzag": 2})
"""A sequence length divisible by ranks x this gives every rank the same number of tokens."""


def check_layout_name(name: str) -> str:
    """The name itself; ValueError with the nearest right one if there is no such layout."""
    if name not in LAYOUTS:
        raise ValueError(
            f"layout must be one of {list(LAYOUTS)}, got {name!r}{nearest(name, LAYOUTS)}"
        )
    return name


def make_layout(name: str, num_ranks: int, seqlen: int) -> Layout:
    """The layout called `name` for `seqlen` tokens on `num_ranks` ranks."""
    return LAYOUTS[check_layout_name(name)](num_ranks, seqlen)


def merge_shards(layout: Layout, degree: int) -> Layout:
    """The layout of groups of `degree` consecutive ranks (what Ulysses makes of it)."""
    return tuple(
        join(piece for shard in layout[at : at + degree] for piece in shard)
        for at in range(0, len(layout), degree)
    )


def lengths(layout: Layout) -> tuple[int, ...]:
    """How many tokens each rank owns."""
    return tuple(size(shard) for shard in layout)


def _chunks(name: str, num_ranks: int, num_chunks: int, seqlen: int) -> list[Range]:
    if seqlen < num_chunks:
        raise ValueError(
            f"a sequence of {seqlen} tokens is too short for the {name} layout on {num_ranks} "
            f"ranks: it needs at least {num_chunks} tokens, one for each chunk"
        )
    edges = [chunk * seqlen // num_chunks for chunk in range(num_chunks + 1)]
    return list(pairwise(edges))
