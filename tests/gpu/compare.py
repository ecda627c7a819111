"""A kernel on one tile, forward and backward, beside the reference kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.gpu import emulation
from wf_backends.kernels import Kernel, Scores, TileGrad
from wf_backends.kernels.reference import ReferenceKernel
from wf_backends.schedule.mask import Band

SCORES = Scores(0.3)
Tile = tuple[int, int, Band]  # (query rows, key rows, band)
HEAD_COUNTS = [(4, 4), (4, 2), (4, 1)]  # (query heads, key heads)
GPU_TOLERANCES = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float32: 2e-6}
"""A few roundings of the dtype: 8, 11 and 24 significant bits."""


def draw_rows(rows: int, heads: int, width: int, **options) -> Tensor:
    """(2, rows, heads, width), a view of a buffer with rows first, as the runtime passes it."""
    random = torch.Generator().manual_seed(rows)
    buffer = torch.randn(rows, 2, heads, width, generator=random)
    return buffer.to(**options).permute(1, 0, 2, 3)


def tile_errors(
    kernel: Kernel,
    tile: Tile,
    heads: tuple[int, int] = (4, 2),
    scores: Scores = SCORES,
    value_dim: int = 16,
    **options,
) -> list[float]:
    """Relative errors of out, lse, dq, dk, dv.

    The backward gets the out and lse of a row that has seen as many keys in other tiles.

    Args:
        options: dtype and device of the tensors.
    """
    rows, keys, band = tile
    num_heads, num_key_heads = heads
    q = draw_rows(rows, num_heads, 16, **options)
    dout = draw_rows(rows, num_heads, value_dim, **options) * -0.7
    k = draw_rows(keys, num_key_heads, 16, **options) * 0.9
    v = draw_rows(keys, num_key_heads, value_dim, **options) * 0.8
    reference = ReferenceKernel()
    actual = kernel.forward(q, k, v, scores, band)
    expected = reference.forward(q, k, v, scores, band)

    row_out = (expected[0] * 0.5).to(q.dtype)
    row_lse = (expected[1] + 0.7).transpose(1, 2).contiguous().transpose(1, 2)  # log 2 = 0.7
    delta = (dout.float() * row_out.float()).sum(-1).transpose(1, 2)
    tile_grad = TileGrad(dout, q, k, v, row_out, row_lse, delta)
    actual += kernel.backward(tile_grad, scores, band)
    expected += reference.backward(tile_grad, scores, band)
    return [relative_error(x, y) for x, y in zip(actual, expected, strict=True)]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected).norm() / expected.norm())


def record_dtypes(monkeypatch: pytest.MonkeyPatch) -> set[torch.dtype]:
    """The dtypes of the queries and keys that emulated libraries get from now on."""
    dtypes: set[torch.dtype] = set()
    probabilities = emulation.probabilities

    def recorded(q: Tensor, k: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        dtypes.update((q.dtype, k.dtype))
        return probabilities(q, k, *args, **kwargs)

    monkeypatch.setattr(emulation, "probabilities", recorded)
    return dtypes
