"""ring-flash-attn: its zigzag ring and its plain ring, with kernels of flash-attn."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ring_flash_attn import ring_flash_attn_func, zigzag_ring_flash_attn_func
from torch import Tensor

from peer_adapters import MakeScheme, Scheme, Setup


def schemes(setup: Setup) -> Mapping[str, MakeScheme]:
    """Both rings on the default group."""
    return {
        "zigzag ring": partial(make, zigzag_ring_flash_attn_func, setup.zigzag()),
        "contiguous ring": partial(make, ring_flash_attn_func, setup.contiguous()),
    }


def make(function: Any, positions: Tensor) -> Scheme:
    """One of the package's functions as a scheme."""
    return Scheme(positions, partial(function, causal=True))
