# pyright: reportUnnecessaryIsInstance=false
"""A mask in slices: queries of one range, keys of another, and which of them see each other.

Pure: standard library only. Positions are global token positions.
Source: MagiAttention (SandAI), whose words for a mask these are.
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
    """The queries in `q` see the keys in `k` that also lie in the band around them."""

    q: Range
    k: Range
    left: Bound = inf
    right: Bound = inf

    @property
    def band(self) -> Band:
        """Which keys of the slice a query sees, by its position."""
        return Band(self.left, self.right)

    def __str__(self) -> str:
        return f"queries {self.q} of keys {self.k}, {self.band}"

    @property
    def distances(self) -> tuple[Bound, Bound]:
        """The least and the largest key - query of two that see each other; all between occur."""
        (q0, q1), (k0, k1) = self.q, self.k
        return max(-self.left, k0 - q1 + 1), min(self.right, k1 - 1 - q0)

    def overlaps(self, other: Slice) -> bool:
        """Whether some query sees some key in both."""
        q, k = intersect((self.q,), (other.q,)), intersect((self.k,), (other.k,))
        if not q or not k:
            return False
        both = Slice(q[0], k[0])
        least, most = zip(self.distances, other.distances, both.distances, strict=True)
        return max(least) <= min(most)


TYPES: Mapping[str, Callable[[Range, Range], tuple[Bound, Bound]]] = MappingProxyType(
    {
        "full": lambda q, k: (inf, inf),
        "causal": lambda q, k: (inf, k[1] - q[1]),  # the last query sees up to the last key
        "inverse_causal": lambda q, k: (q[0] - k[0], inf),  # the first one from the first key on
        "bicausal": lambda q, k: (q[0] - k[0], k[1] - q[1]),
    }
)
"""type -> the (left, right) bounds of a slice of these queries and keys."""

SLICE_WORDS = ("q_ranges", "k_ranges", "attn_mask_types")


def make_slices(q_ranges: Any, k_ranges: Any, attn_mask_types: Any) -> tuple[Slice, ...]:
    """The three lists that tell of slices, as slices in their order; those that are empty left out.

    Args:
        q_ranges, k_ranges: (start, stop) of every slice, host integers, positions.
        attn_mask_types: the name in TYPES of each.

    Raises:
        ValueError: if one is missing, the lengths differ, a range or a type is malformed, or some
            query sees some key in two slices; names the slices.
    """
    given = dict(zip(SLICE_WORDS, (q_ranges, k_ranges, attn_mask_types), strict=True))
    if missing := [name for name, value in given.items() if value is None]:
        raise ValueError(f"q_ranges, k_ranges and attn_mask_types go together: {missing} missing")
    queries, keys = (
        tuple(_range(f"{name}[{at}]", pair) for at, pair in enumerate(_listed(name, given[name])))
        for name in SLICE_WORDS[:2]
    )
    types = tuple(_type(name) for name in _listed("attn_mask_types", attn_mask_types))
    counts = len(queries), len(keys), len(types)
    if len({*counts}) > 1:
        raise ValueError(
            f"q_ranges, k_ranges and attn_mask_types must have one entry a slice, got {counts}"
        )
    if not queries:
        raise ValueError("q_ranges, k_ranges and attn_mask_types are empty: no query sees a key")
    return _built(queries, keys, types)


@lru_cache(maxsize=64)
def _built(
    queries: tuple[Range, ...], keys: tuple[Range, ...], types: tuple[str, ...]
) -> tuple[Slice, ...]:
    """Checked once, since every layer of a model gives the same."""
    slices = [Slice(q, k, *TYPES[t](q, k)) for q, k, t in zip(queries, keys, types, strict=True)]
    for one, other in _meetings(slices):
        if slices[one].overlaps(slices[other]):
            told = (
                f"slice {at} (queries {queries[at]}, keys {keys[at]}, {types[at]})"
                for at in (one, other)
            )
            raise ValueError(
                f"slices of a mask must not overlap: {' and '.join(told)} hold the same "
                "(query, key) pairs"
            )
    return tuple(one for one in slices if one.distances[0] <= one.distances[1])


def _meetings(slices: Sequence[Slice]) -> Iterator[tuple[int, int]]:
    """The numbers of all slices that have queries in common, each pair once."""
    active: list[int] = []
    for at in sorted(range(len(slices)), key=lambda at: slices[at].q):
        start = slices[at].q[0]
        active = [other for other in active if slices[other].q[1] > start]
        yield from ((min(at, other), max(at, other)) for other in active)
        active.append(at)


def refuse_tensor(name: str, value: Any) -> None:
    """ValueError for a tensor, whose numbers would hide a device synchronisation."""
    if hasattr(value, "is_cuda"):
        raise ValueError(f"{name} must be host integers; pass {name}.tolist() once per batch")


def _listed(name: str, value: Any) -> list[Any]:
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
    if name not in tuple(TYPES):  # a tuple: what cannot be hashed is refused too
        raise ValueError(
            f"attn_mask_types must be of {list(TYPES)}, got {name!r}{nearest(name, TYPES)}"
        )
    return name
