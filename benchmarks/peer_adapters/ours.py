"""WallFacer, through what a user holds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from bytes import named_points
from torch import Tensor

from peer_adapters import Make, Place, Scheme
from wf_backends import SequenceParallel, SequenceParallelConfig


def schemes(place: Place) -> Mapping[str, Make]:
    """The schemes with names that fit this many ranks, and what the planner picks."""
    points = {**named_points(place.size), "auto": {"route": "auto"}}
    return {name: partial(make, place, words) for name, words in points.items()}


def make(place: Place, words: Mapping[str, Any]) -> Scheme:
    """A configuration as a scheme."""
    same = {"sequence_parallel_size": place.size, "layout": "zigzag", "kernel": "sdpa"}
    sp = SequenceParallel(SequenceParallelConfig.from_dict({**same, **words}))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sp.attention(q, k, v, causal=True)

    def reported() -> int:
        return sum(sp.report().values())

    return Scheme(sp.positions(place.tokens), attend, reported=reported)
