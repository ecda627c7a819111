"""Query rows of causal attention, for which no mask of rows x keys is made."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from wf_backends.graph import StorageTracker
from wf_backends.slicing.rules_attention import attend_rows

ROWS, KEYS, WIDTH = 16, 1024, 8


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
def test_rows_are_those_of_the_whole(
    dtype: torch.dtype, error: float, kv_heads: int, scale: float | None
) -> None:
    draw = torch.Generator().manual_seed(0)
    sizes = ((2, KEYS), (kv_heads, KEYS), (kv_heads, KEYS))
    q, k, v = (torch.randn(1, *size, WIDTH, generator=draw).to(dtype) for size in sizes)
    words = {"is_causal": True, "scale": scale, "enable_gqa": True}
    whole = scaled_dot_product_attention(q.double(), k.double(), v.double(), **words)
    before = KEYS - ROWS
    with StorageTracker((q, k, v)) as tracker:
        rows = attend_rows(q[:, :, before:], k, v, before, scale)
    assert rows.dtype == dtype
    assert (rows - whole[:, :, before:]).abs().max() <= error
    own = rows.numel() * 8  # a float64's
    assert tracker.peak <= 6 * own < ROWS * KEYS
