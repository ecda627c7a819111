"""A kernel of Triton's, for `launch_kinds.py`."""

from __future__ import annotations

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]


@triton.jit
def add_one(x, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton reads annotations
    """Add 1 to the first BLOCK elements."""
    at = tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at) + 1)
