"""The benchmark's stand-in for flash-attn beside the reference kernel, in float64."""

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
    """The module under another name: no other test shall find a flash_attn."""
    spec = spec_from_file_location("flash_stand_in", FOLDER / "flash_attn_interface.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def draw(rows: int, keys: int):
    """q and dout of 4 heads, k and v of 2."""
    random = torch.Generator().manual_seed(1)
    shapes = [(2, rows, 4, 8), (2, rows, 4, 8), (2, keys, 2, 8), (2, keys, 2, 8)]
    return [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]


def words(causal: bool = False, window: tuple[int, int] = (-1, -1), dropout_p: float = 0.0):
    return {
        "dropout_p": dropout_p,
        "softmax_scale": SCALE,
        "causal": causal,
        "window_size_left": window[0],
        "window_size_right": window[1],
        "softcap": 0.0,
        "alibi_slopes": None,
    }


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
def test_forward_and_backward_are_those_of_the_reference(rows, keys, causal, window, band):
    module, kernel = stand_in(), ReferenceKernel()
    q, dout, k, v = draw(rows, keys)
    out, lse, *_ = module._flash_attn_forward(
        q, k, v, **words(causal, window), return_softmax=False
    )
    right_out, right_lse = kernel.forward(q, k, v, Scores(SCALE), band)
    torch.testing.assert_close(out, right_out, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse, right_lse, rtol=1e-10, atol=1e-10)

    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    delta = module._flash_attn_backward(
        dout, q, k, v, out, lse, *grads, **words(causal, window), deterministic=False
    )
    right_delta = (dout * right_out).sum(-1).transpose(1, 2)
    tile = TileGrad(dout, q, k, v, right_out, right_lse, right_delta)
    right = kernel.backward(tile, Scores(SCALE), band)
    torch.testing.assert_close(delta.double(), right_delta, rtol=1e-5, atol=1e-5)
    for grad, expected in zip(grads, right, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-10)


def test_what_it_lacks_is_refused():
    module = stand_in()
    q, _, k, v = draw(4, 4)
    with pytest.raises(NotImplementedError, match="dropout_p=0.5"):
        module._flash_attn_forward(q, k, v, **words(dropout_p=0.5), return_softmax=False)
    with pytest.raises(NotImplementedError, match="packed documents"):
        module._flash_attn_varlen_forward()


def test_nobody_finds_it_unasked():
    found = find_spec("flash_attn")
    assert found is None or str(FOLDER) not in str(found.origin)
