"""Kernels in bfloat16 and float16 have the errors of torch's own attention."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.tile_cases import (
    LONG_TILES,
    SCALE,
    TILES,
    Case,
    dense,
    dense_mask,
    error,
    errors,
    make_case,
    run,
)
from wf_backends.schedule.mask import CAUSAL, FULL

HALF_TYPES = (torch.bfloat16, torch.float16)
CASES = [
    pytest.param(dtype, TILES[name], id=f"{name}-{dtype}")
    for name in ("full", "causal", "anti-causal", "window")
    for dtype in HALF_TYPES
]
CASES += [  # long tiles take long: each in one of the types
    pytest.param(dtype, tile, id=f"long: {name}-{dtype}")
    for dtype, (name, tile) in zip(cycle(HALF_TYPES), LONG_TILES.items(), strict=False)
]


def errors_of_torch(case: Case) -> list[float]:
    """Errors of out, dq, dk, dv of torch's own attention in the dtype of the case."""
    q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in (case.q, case.k, case.v))
    mask = dense_mask(q.shape[2], k.shape[2], case.band)
    options = {"is_causal": True} if case.band == CAUSAL else {"attn_mask": mask}
    options = {} if case.band == FULL else options
    out = F.scaled_dot_product_attention(q, k, v, scale=SCALE, enable_gqa=True, **options)
    grads = torch.autograd.grad(out, (q, k, v), case.dout.transpose(1, 2))
    expected_out, _, expected_grads = dense(case.double())
    results = [x.transpose(1, 2) for x in (out.detach(), *grads)]
    return [error(x, y) for x, y in zip(results, [expected_out, *expected_grads], strict=True)]


@pytest.mark.parametrize(("dtype", "tile"), CASES)
def test_errors_are_at_most_one_and_a_half_times_those_of_torch(tile, dtype):
    case = make_case(tile, heads=(2, 1), head_dim=64, dtype=dtype)
    limits = [1.5 * error_of_torch for error_of_torch in errors_of_torch(case)]
    for name in ("sdpa", "reference"):
        out_and_grads = errors(run(name, case), case)[:4]
        assert all(x <= limit for x, limit in zip(out_and_grads, limits, strict=True)), name
