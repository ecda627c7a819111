"""Query rows of causal attention, for which no mask of rows x keys is made."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from wf_backends.graph import Effects, StorageTracker
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


@pytest.mark.parametrize("rows", [16, 128])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_the_operations_of_rows_are_counted(
    dtype: torch.dtype, kv_heads: int, rows: int
) -> None:
    """torch's own counter takes rows for heads in these operators, and fails."""
    graph, heads = fx.Graph(), (4, kv_heads, kv_heads)
    given = [graph.placeholder(name) for name in "qkv"]
    with FakeTensorMode():
        for node, count, length in zip(given, heads, (rows, KEYS, KEYS), strict=True):
            node.meta["val"] = torch.empty(1, count, length, 64, dtype=dtype, device="cuda")
    node = graph.call_function(attend_rows, (*given, KEYS - rows, None))
    effect = Effects().of(node)
    assert effect.result.shape == (1, 4, rows, 64)
    assert effect.result.dtype == dtype
    assert effect.flops == 2 * 4 * rows * KEYS * (64 + 64)
    own, scores = 4 * rows * 64 * 4, 4 * rows * KEYS * 2  # bytes
    repeated = 2 * 4 * KEYS * 64 * 4 if dtype is torch.float32 and kv_heads < 4 else 0
    assert effect.temporary <= repeated + 4 * own < repeated + scores
