"""Some query rows of causal attention, computed without a mask of rows x keys.

The reference is torch's attention of all rows in float64.
"""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from wf_backends.autochunk.graph import Effects, StorageTracker
from wf_backends.autochunk.slicing.rules_attention import attend_rows

ROWS, KEYS, WIDTH = 16, 1024, 8


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)],
    ids=str,
)
def test_rows_equal_those_of_all_queries_in_less_memory_than_a_mask(
    dtype: torch.dtype, tolerance: float, kv_heads: int, scale: float | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, KEYS, WIDTH, generator=generator).to(dtype)
        for heads in (2, kv_heads, kv_heads)
    )
    expected = scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True, scale=scale, enable_gqa=True
    )
    first_row = KEYS - ROWS
    with StorageTracker((q, k, v)) as tracker:
        out = attend_rows(q[:, :, first_row:], k, v, first_row, scale)
    assert out.dtype == dtype
    assert (out - expected[:, :, first_row:]).abs().max() <= tolerance
    out_bytes = out.numel() * 8  # in float64
    assert tracker.peak <= 6 * out_bytes < ROWS * KEYS


def test_rows_under_autocast_are_those_of_torchs_attention_in_its_dtype() -> None:
    """Queries and keys with rotary embeddings are float32, values that a linear made bfloat16."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, KEYS, WIDTH, generator=generator) for _ in range(3))
    v = v.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        expected = scaled_dot_product_attention(q, k, v, is_causal=True)
        out = attend_rows(q[:, :, -ROWS:], k, v, KEYS - ROWS, None)
    assert out.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected[:, :, -ROWS:], rtol=0, atol=2e-2)


@pytest.mark.parametrize("rows", [16, 128])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_flops_and_temporaries_on_cuda(dtype: torch.dtype, kv_heads: int, rows: int) -> None:
    """torch's own counter mistakes rows for heads in the operators that run on CUDA, and fails."""
    heads, width = 4, 64
    graph = fx.Graph()
    q, k, v = (graph.placeholder(name) for name in "qkv")
    with FakeTensorMode():
        q.meta["val"] = torch.empty(1, heads, rows, width, dtype=dtype, device="cuda")
        for node in (k, v):
            node.meta["val"] = torch.empty(1, kv_heads, KEYS, width, dtype=dtype, device="cuda")
    effect = Effects().of(graph.call_function(attend_rows, (q, k, v, KEYS - rows, None)))
    assert effect.result.shape == (1, heads, rows, width)
    assert effect.result.dtype == dtype
    assert effect.flops == 2 * heads * rows * KEYS * (width + width)
    out_bytes, scores_bytes = heads * rows * width * 4, heads * rows * KEYS * 2
    repeats_kv_heads = dtype is torch.float32 and kv_heads < heads
    repeated_bytes = 2 * heads * KEYS * width * 4 if repeats_kv_heads else 0
    assert effect.temporary <= repeated_bytes + 4 * out_bytes < repeated_bytes + scores_bytes
