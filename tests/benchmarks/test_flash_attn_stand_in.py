"""The benchmarks' stand-in for flash-attn equals the reference kernel, in float64."""

from __future__ import annotations

from importlib.util import find_spec, module_from_spec, spec_from_file_location
from math import inf
from pathlib import Path

import pytest
import torch

from wf_backends.kernels import Scores, TileGrad
from wf_backends.kernels.reference import ReferenceKernel
from wf_backends.schedule.mask import Band

FOLDER = Path(__file__).parents[2] / "benchmarks" / "flash_attn_stand_in" / "flash_attn"
SCALE = 0.3


def stand_in():
    """The module under another name: `import flash_attn` must not find it in other tests."""
    spec = spec_from_file_location("flash_stand_in", FOLDER / "flash_attn_interface.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def draw_tensors(rows: int, keys: int):
    """q and dout with 4 heads, k and v with 2: batch 2, head_dim 8."""
    random = torch.Generator().manual_seed(1)
    shapes = [(2, rows, 4, 8), (2, rows, 4, 8), (2, keys, 2, 8), (2, keys, 2, 8)]
    return [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]


def arguments(causal: bool = False, window: tuple[int, int] = (-1, -1), dropout_p: float = 0.0):
    """Keyword arguments of flash-attn's forward and backward."""
    return {
        "dropout_p": dropout_p,
        "softmax_scale": SCALE,
        "causal": causal,
        "window_size_left": window[0],
        "window_size_right": window[1],
        "softcap": 0.0,
        "alibi_slopes": None,
    }


# rows, keys, flash-attn's causal and window_size (aligned to the last key), our band
CASES = [
    (17, 17, False, (-1, -1), Band()),
    (17, 17, True, (-1, -1), Band(right=0)),
    (9, 17, False, (-1, -1), Band()),
    (9, 17, True, (-1, -1), Band(right=8)),
    (17, 17, True, (5, -1), Band(5, 0)),
    (17, 17, False, (5, 3), Band(5, 3)),
    (9, 17, False, (5, 3), Band(-3, 11)),
    (17, 17, False, (-1, 0), Band(inf, 0)),
]


@pytest.mark.parametrize(("rows", "keys", "causal", "window", "band"), CASES)
def test_forward_and_backward_equal_the_reference_kernel(rows, keys, causal, window, band):
    module, reference = stand_in(), ReferenceKernel()
    q, dout, k, v = draw_tensors(rows, keys)
    out, lse, *_ = module._flash_attn_forward(
        q, k, v, **arguments(causal, window), return_softmax=False
    )
    expected_out, expected_lse = reference.forward(q, k, v, Scores(SCALE), band)
    torch.testing.assert_close(out, expected_out, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-10, atol=1e-10)

    gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    delta = module._flash_attn_backward(
        dout, q, k, v, out, lse, *gradients, **arguments(causal, window), deterministic=False
    )
    expected_delta = (dout * expected_out).sum(-1).transpose(1, 2)
    tile = TileGrad(dout, q, k, v, expected_out, expected_lse, expected_delta)
    torch.testing.assert_close(  # delta is float32
        delta.double(), expected_delta, rtol=1e-5, atol=1e-5
    )
    for actual, expected in zip(
        gradients, reference.backward(tile, Scores(SCALE), band), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_dropout_and_packed_documents_are_refused():
    module = stand_in()
    q, _, k, v = draw_tensors(4, 4)
    with pytest.raises(NotImplementedError, match="dropout_p=0.5"):
        module._flash_attn_forward(q, k, v, **arguments(dropout_p=0.5), return_softmax=False)
    with pytest.raises(NotImplementedError, match="packed documents"):
        module._flash_attn_varlen_forward()


def test_import_flash_attn_does_not_find_the_stand_in():
    spec = find_spec("flash_attn")
    assert spec is None or str(FOLDER) not in str(spec.origin)
