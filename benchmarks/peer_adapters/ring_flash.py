"""ring-flash-attn: its zigzag and its plain ring; kernels from flash-attn."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ring_flash_attn import ring_flash_attn_func, zigzag_ring_flash_attn_func
from torch import Tensor

from peer_adapters import Make, Place, Scheme


def schemes(place: Place) -> Mapping[str, Make]:
    """Both rings on the default group."""
    return {
        "zigzag ring": partial(make, zigzag_ring_flash_attn_func, place.zigzag()),
        "contiguous ring": partial(make, ring_flash_attn_func, place.contiguous()),
    }


def make(function: Any, positions: Tensor) -> Scheme:
    """One of the package's functions as a scheme."""
    return Scheme(positions, partial(function, causal=True))
