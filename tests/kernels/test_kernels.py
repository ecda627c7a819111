"""Every kernel that runs on a CPU against a dense softmax in float64, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest
import torch

from tests.dense import largest
from tests.kernels.tile_cases import (
    LONG_TILES,
    ONE_KEY_TILES,
    SCALE,
    SCORES,
    TILES,
    Case,
    delta_of,
    dense,
    dense_mask,
    error,
    errors,
    kernel_named,
    make_case,
    run,
)
from wf_backends.kernels import Scores, TileGrad, reference
from wf_backends.kernels.merge import merge
from wf_backends.schedule.mask import CAUSAL, FULL, Band

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ALL_TILES = TILES | ONE_KEY_TILES
EXACT = [
    ("reference", torch.float64, 1e-12),
    ("sdpa", torch.float64, 1e-10),
    ("reference", torch.float32, 2e-6),
    ("sdpa", torch.float32, 2e-6),
]
"""(kernel, dtype, largest relative error): float32 has a precision of 6e-8."""


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES.keys())
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("name, dtype, tolerance", EXACT)
def test_kernel_is_the_dense_softmax(name, dtype, tolerance, heads, tile):
    case = make_case(tile, heads, dtype=dtype)
    assert largest(errors(run(name, case), case)) < tolerance


@pytest.mark.parametrize("tile", ONE_KEY_TILES.values(), ids=ONE_KEY_TILES.keys())
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("name, dtype, tolerance", EXACT)
def test_kernel_gives_zero_dq_and_dk_where_rows_see_one_key(name, dtype, tolerance, heads, tile):
    """dq and dk are differences of equal numbers: their errors are compared with the size of dout,
    and are 50 times as large."""
    case = make_case(tile, heads, dtype=dtype)
    out, lse, (dq, dk, dv) = run(name, case)
    dout_size = float(case.dout.abs().max())
    assert float(dq.abs().max()) < 50 * tolerance * dout_size
    assert float(dk.abs().max()) < 50 * tolerance * dout_size
    expected_out, expected_lse, (_, _, expected_dv) = dense(case.double())
    assert error(out, expected_out) < tolerance
    assert error(lse, expected_lse) < tolerance
    assert error(dv, expected_dv) < tolerance


@pytest.mark.parametrize("tile", LONG_TILES.values(), ids=LONG_TILES.keys())
@pytest.mark.parametrize("name, dtype, tolerance", EXACT)
@pytest.mark.parametrize("batch", (1, 2))
def test_long_tiles_that_are_split_are_exact(name, dtype, tolerance, tile, batch):
    """Rows of one sequence lie evenly apart in memory; those of two do not."""
    case = make_case(tile, heads=(2, 1), dtype=dtype, batch=batch)
    assert largest(errors(run(name, case), case)) < tolerance


@pytest.mark.parametrize("head_dim", [16, 24, 64, 80, 128, 256])
@pytest.mark.parametrize("name, dtype, tolerance", EXACT)
def test_every_head_dim_is_exact(name, dtype, tolerance, head_dim):
    case = make_case((24, 40, Band(10, 20)), head_dim=head_dim, dtype=dtype)
    case = replace(case, q=case.q / (SCALE * sqrt(head_dim)))  # logits of variance 1, as in models
    assert largest(errors(run(name, case), case)) < tolerance


@pytest.mark.parametrize("tile", ["causal", "window", "anti-causal, shifted"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["reference", "sdpa"])
def test_large_logits_stay_finite(name, dtype, tile):
    """In float32 logits of a hundred have absolute errors of 1e-5, and so have the weights."""
    case = make_case(TILES[tile], dtype=dtype, head_dim=64)
    case = replace(case, q=case.q * 40)
    out, lse, grads = run(name, case)
    assert float(lse.abs().max()) > 88  # exp would overflow float32
    assert all(bool(x.isfinite().all()) for x in (out, lse, *grads))
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4}.get(dtype, 2e-2)
    assert error(out, dense(case.double())[0]) < tolerance


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference_returns_the_dtype_that_it_computes_in(dtype):
    out, lse, grads = run("reference", make_case(TILES["causal"], dtype=dtype))
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert {x.dtype for x in (out, lse, *grads)} == {expected}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile", ["full", "causal", "window"])
def test_lse_of_sdpa_is_never_half(dtype, tile):
    _, lse, _ = run("sdpa", make_case(TILES[tile], dtype=dtype))
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("tile", ALL_TILES)
@pytest.mark.parametrize("scores", (SCORES, Scores(2.0, 0.5, torch.rand(4))), ids=("plain", "all"))
def test_reference_gives_the_same_in_blocks_of_rows(monkeypatch, tile, scores):
    """Blocks of three rows against one block; "all" scores are those with softcap and ALiBi."""
    case = make_case(ALL_TILES[tile])
    rows, keys, _ = ALL_TILES[tile]
    scores = scores.at_positions(torch.arange(7, 7 + rows), torch.arange(keys))
    out, lse, grads = run("reference", case, scores)
    batch, heads = 2, 4
    monkeypatch.setattr(reference, "BLOCK_SCORES", 3 * batch * heads * keys)
    out_in_blocks, lse_in_blocks, grads_in_blocks = run("reference", case, scores)
    in_blocks = (out_in_blocks, lse_in_blocks, *grads_in_blocks)
    for actual, expected in zip(in_blocks, (out, lse, *grads), strict=True):
        assert (actual - expected).abs().max() < 1e-13


def tiles_of_halves(band: Band, num_keys: int) -> list[tuple[slice, slice]]:
    """The (rows, keys) of two tiles of a square band: of the first and of the last half of keys."""
    mask, tiles = dense_mask(num_keys, num_keys, band), []
    for keys in (slice(0, num_keys // 2), slice(num_keys // 2, num_keys)):
        rows = mask[:, keys].any(1).nonzero().flatten().tolist()
        tiles.append((slice(rows[0], rows[-1] + 1), keys))
    return tiles


@pytest.mark.parametrize("name, dtype, tolerance", EXACT)
@pytest.mark.parametrize("band", [FULL, CAUSAL, Band(30, 0), Band(12, 7)], ids=str)
def test_tiles_of_a_row_merge_by_lse_and_their_gradients_add_up(name, dtype, tolerance, band):
    """The backward of each tile gets lse and delta of the whole row."""
    case = make_case((48, 48, band), dtype=dtype)
    kernel, q, dout = kernel_named(name, case), case.q, case.dout
    tiles = tiles_of_halves(band, 48)
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf, dtype=dtype)
    for r, c in tiles:
        band_of_tile = band.shift(c.start - r.start)
        block_out, block_lse = kernel.forward(
            q[:, r], case.k[:, c], case.v[:, c], SCORES, band_of_tile
        )
        merge(out[:, r], lse[:, r], block_out, block_lse.transpose(1, 2))
    row_lse, delta = lse.transpose(1, 2), delta_of(dout, out).to(dtype)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, case.k, case.v))
    for r, c in tiles:
        band_of_tile = band.shift(c.start - r.start)
        inputs = dout[:, r], q[:, r], case.k[:, c], case.v[:, c]
        statistics = out[:, r], row_lse[:, :, r], delta[:, :, r]
        grads = kernel.backward(TileGrad(*inputs, *statistics), SCORES, band_of_tile)
        for total, grad in zip((dq[:, r], dk[:, c], dv[:, c]), grads, strict=True):
            total += grad
    assert largest(errors((out, row_lse, [dq, dk, dv]), case)) < tolerance


@pytest.mark.parametrize("tile", ["full", "causal", "window", "anti-causal, shifted"])
@pytest.mark.parametrize("name", ["reference", "sdpa"])
def test_inputs_are_not_changed(name, tile):
    case = make_case(TILES[tile], dtype=torch.float32)
    tensors = case.q, case.k, case.v, case.dout
    copies = [x.clone() for x in tensors]
    run(name, case)
    assert all(torch.equal(x, copy) for x, copy in zip(tensors, copies, strict=True))


@pytest.mark.parametrize("tile", ["full", "causal", "window", "anti-causal, shifted"])
@pytest.mark.parametrize("name", ["reference", "sdpa"])
def test_strides_do_not_change_results(name, tile):
    case = make_case(TILES[tile], dtype=torch.float32)
    tensors = case.q, case.k, case.v, case.dout
    assert not any(x.is_contiguous() for x in tensors)
    out, lse, grads = run(name, case)
    contiguous_case = Case(*(x.contiguous() for x in tensors), case.band)
    expected_out, expected_lse, expected_grads = run(name, contiguous_case)
    assert error(out, expected_out) < 1e-6
    assert error(lse, expected_lse) < 1e-6
    for grad, expected in zip(grads, expected_grads, strict=True):
        assert error(grad, expected) < 1e-6
