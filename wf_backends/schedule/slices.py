# pyright: reportUnnecessaryIsInstance=false
"""Slices of a mask: queries of one range, keys of another, and a band between them.

Positions are global token positions.
Source: the argument names and mask types are those of MagiAttention (SandAI).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import inf
from operator import index
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from wf_backends._validation import nearest
from wf_backends.schedule.band import Band, Bound
from wf_backends.schedule.ranges import Range, intersect


class Slice(NamedTuple):
    """Queries in the range `q` see those keys in the range `k` that lie in the band around them."""

    q: Range
    k: Range
    left: Bound = inf
    right: Bound = inf

    @property
    def band(self) -> Band:
        """The band, in global positions."""
        return Band(self.left, self.right)

    def __str__(self) -> str:
        return f"queries {self.q} of keys {self.k}, {self.band}"

    @property
    def distances(self) -> tuple[Bound, Bound]:
        """The smallest and largest key - query of its pairs; it is empty if smallest > largest."""
        (q0, q1), (k0, k1) = self.q, self.k
        return max(-self.left, k0 - q1 + 1), min(self.right, k1 - 1 - q0)

    def overlaps(self, other: Slice) -> bool:
        """Whether some (query, key) pair lies in both."""
        q, k = intersect((self.q,), (other.q,)), intersect((self.k,), (other.k,))
        if not q or not k:
            return False
        left, right = min(self.left, other.left), min(self.right, other.right)
        smallest, largest = Slice(q[0], k[0], left, right).distances
        return smallest <= largest


TYPES: Mapping[str, Callable[[Range, Range], tuple[Bound, Bound]]] = MappingProxyType(
    {
        "full": lambda q, k: (inf, inf),
        "causal": lambda q, k: (inf, k[1] - q[1]),  # the last query sees all keys
        "inverse_causal": lambda q, k: (q[0] - k[0], inf),  # the first query sees all keys
        "bicausal": lambda q, k: (q[0] - k[0], k[1] - q[1]),
    }
)
"""Type -> the (left, right) bounds of its band, from the ranges of queries and of keys."""

SLICE_ARGUMENTS = ("q_ranges", "k_ranges", "attn_mask_types")


def make_slices(q_ranges: Any, k_ranges: Any, attn_mask_types: Any) -> tuple[Slice, ...]:
    """The slices that three lists of equal length describe, in their order, without empty slices.

    Args:
        q_ranges, k_ranges: for each slice, (start, stop) in positions, as host integers.
        attn_mask_types: for each slice, a name in TYPES.

    Raises:
        ValueError: if a list is missing, the lengths differ, a range or a type is malformed, or a
            (query, key) pair lies in two slices: names these slices.
    """
    lists = dict(zip(SLICE_ARGUMENTS, (q_ranges, k_ranges, attn_mask_types), strict=True))
    if missing := [name for name, value in lists.items() if value is None]:
        raise ValueError(f"q_ranges, k_ranges and attn_mask_types go together: {missing} missing")
    queries = _ranges("q_ranges", q_ranges)
    keys = _ranges("k_ranges", k_ranges)
    types = tuple(_type(name) for name in _checked_list("attn_mask_types", attn_mask_types))
    counts = len(queries), len(keys), len(types)
    if len({*counts}) > 1:
        raise ValueError(
            f"q_ranges, k_ranges and attn_mask_types must have one entry per slice, got {counts}"
        )
    if not queries:
        raise ValueError("q_ranges, k_ranges and attn_mask_types are empty: no query sees a key")
    return _checked_slices(queries, keys, types)


@lru_cache(maxsize=64)
def _checked_slices(
    queries: tuple[Range, ...], keys: tuple[Range, ...], types: tuple[str, ...]
) -> tuple[Slice, ...]:
    """The slices without empty ones. Cached, since all layers of a model pass the same lists."""
    slices = [Slice(q, k, *TYPES[t](q, k)) for q, k, t in zip(queries, keys, types, strict=True)]
    for first, second in _pairs_with_common_queries(slices):
        if slices[first].overlaps(slices[second]):
            names = (
                f"slice {i} (queries {queries[i]}, keys {keys[i]}, {types[i]})"
                for i in (first, second)
            )
            raise ValueError(
                f"slices of a mask must not overlap: {' and '.join(names)} hold the same "
                "(query, key) pairs"
            )
    return tuple(s for s in slices if s.distances[0] <= s.distances[1])


def _pairs_with_common_queries(slices: Sequence[Slice]) -> Iterator[tuple[int, int]]:
    """The index pairs (i < j) of all slices that have queries in common."""
    open_slices: list[int] = []  # a sweep over the queries' starts
    for i in sorted(range(len(slices)), key=lambda i: slices[i].q):
        start = slices[i].q[0]
        open_slices = [j for j in open_slices if slices[j].q[1] > start]
        yield from ((min(i, j), max(i, j)) for j in open_slices)
        open_slices.append(i)


def refuse_tensor(name: str, value: Any) -> None:
    """Raise ValueError for a tensor: reading its numbers could synchronize with a device."""
    if hasattr(value, "is_cuda"):
        raise ValueError(f"{name} must be host integers; pass {name}.tolist() once per batch")


def _ranges(name: str, pairs: Any) -> tuple[Range, ...]:
    return tuple(_range(f"{name}[{i}]", pair) for i, pair in enumerate(_checked_list(name, pairs)))


def _checked_list(name: str, value: Any) -> list[Any]:
    refuse_tensor(name, value)
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"{name} must be a list with an entry for every slice, got {value!r}")
    return list(cast(Sequence[Any], value))


def _range(name: str, pair: Any) -> Range:
    try:
        start, stop = (index(edge) for edge in pair)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be (start, stop) in tokens, got {pair!r}") from None
    if not 0 <= start < stop:
        raise ValueError(f"{name} must be 0 <= start < stop, got ({start}, {stop})")
    return start, stop


def _type(name: Any) -> str:
    if name not in tuple(TYPES):  # a tuple, so that values without a hash are refused too
        raise ValueError(
            f"attn_mask_types must be of {list(TYPES)}, got {name!r}{nearest(name, TYPES)}"
        )
    return name
