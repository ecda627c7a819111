"""yunchang: USP (Ulysses around a zigzag ring), with kernels of flash-attn."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from yunchang import EXTRACT_FUNC_DICT, LongContextAttention, set_seq_parallel_pg

from peer_adapters import MakeScheme, Scheme, Setup


def schemes(setup: Setup) -> Mapping[str, MakeScheme]:
    """USP with every degree that leaves a ring of 2 or more ranks.

    A ring of one rank sends to itself, which gloo refuses.
    """
    degrees = [u for u in (2, 4) if setup.size % u == 0 and setup.size > u] or [1]
    return {f"USP, {u} x zigzag ring({setup.size // u})": partial(make, setup, u) for u in degrees}


def make(setup: Setup, ulysses_degree: int) -> Scheme:
    """The scheme; the package keeps its groups in globals and reads them here."""
    ring_size = setup.size // ulysses_degree
    set_seq_parallel_pg(ulysses_degree, ring_size, setup.rank, setup.size)
    attention = LongContextAttention(ring_impl_type="zigzag")
    all_positions = torch.arange(setup.tokens)[None, :, None]
    extract = EXTRACT_FUNC_DICT["zigzag"]
    positions = extract(
        all_positions, setup.rank, setup.size, rd=ring_size, ud=ulysses_degree
    ).flatten()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=True)

    return Scheme(positions, attend)
