"""WallFacer, through its public interface."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from bytes import named_points
from torch import Tensor

from peer_adapters import MakeScheme, Scheme, Setup
from wf_backends import SequenceParallel, SequenceParallelConfig


def schemes(setup: Setup) -> Mapping[str, MakeScheme]:
    """The named schemes that fit this number of ranks, and the planner's choice."""
    points = {**named_points(setup.size), "auto": {"route": "auto"}}
    return {name: partial(make, setup, options) for name, options in points.items()}


def make(setup: Setup, options: Mapping[str, Any]) -> Scheme:
    """The scheme of a configuration."""
    common = {"sequence_parallel_size": setup.size, "layout": "zigzag", "kernel": "sdpa"}
    sp = SequenceParallel(SequenceParallelConfig.from_dict({**common, **options}))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sp.attention(q, k, v, causal=True)

    def bytes_reported() -> int:
        return sum(sp.report().values())

    return Scheme(sp.positions(setup.tokens), attend, bytes_reported=bytes_reported)
