"""yunchang: USP, Ulysses around a zigzag ring; kernels from flash-attn."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from yunchang import EXTRACT_FUNC_DICT, LongContextAttention, set_seq_parallel_pg

from peer_adapters import Make, Place, Scheme


def schemes(place: Place) -> Mapping[str, Make]:
    """Every head split that leaves a ring: one of one rank sends to itself, which gloo refuses."""
    degrees = [u for u in (2, 4) if place.size % u == 0 and place.size > u] or [1]
    return {f"USP, {u} x zigzag ring({place.size // u})": partial(make, place, u) for u in degrees}


def make(place: Place, ulysses_degree: int) -> Scheme:
    """The groups are the package's globals: they are read here, and not at the call."""
    ring = place.size // ulysses_degree
    set_seq_parallel_pg(ulysses_degree, ring, place.rank, place.size)
    attention = LongContextAttention(ring_impl_type="zigzag")
    whole = torch.arange(place.tokens)[None, :, None]
    cut = EXTRACT_FUNC_DICT["zigzag"]
    positions = cut(whole, place.rank, place.size, rd=ring, ud=ulysses_degree).flatten()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=True)

    return Scheme(positions, attend)
