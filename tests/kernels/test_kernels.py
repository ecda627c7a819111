"""Every kernel that runs on a CPU against a dense softmax in float64, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.dense import largest
from wf_backends.kernels import Kernel, KernelSpec, Scores, TileGrad, reference, select
from wf_backends.kernels.merge import merge
from wf_backends.schedule.mask import CAUSAL, FULL, Band

SCALE = 0.3
SCORES = Scores(SCALE)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
EXACT = [
    ("reference", torch.float64, 1e-12),
    ("sdpa", torch.float64, 1e-10),
    ("reference", torch.float32, 2e-6),
    ("sdpa", torch.float32, 2e-6),
]

# rows, keys, band: every tile is trimmed, as the executor's are
TILES = {
    "full": (24, 24, FULL),
    "full, more rows": (40, 24, FULL),
    "full, more keys": (24, 40, FULL),
    "causal": (24, 24, CAUSAL),
    "causal, more rows": (40, 24, CAUSAL),
    "causal, shifted right": (24, 40, Band(right=16)),
    "causal, shifted right, more rows": (40, 24, Band(right=5)),
    "anti-causal": (24, 24, Band(left=0)),
    "anti-causal, shifted": (40, 24, Band(left=20)),
    "anti-causal, more keys": (24, 40, Band(left=3)),
    "window": (24, 24, Band(5, 0)),
    "window, two-sided": (24, 24, Band(5, 3)),
    "window, shifted": (24, 30, Band(2, 9)),
    "window, more rows": (40, 24, Band(20, 3)),
    "window of one": (24, 24, Band(0, 0)),
    "one row": (1, 24, FULL),
    "one key": (24, 1, FULL),
    "one row and key": (1, 1, CAUSAL),
}
LONG_TILES = {
    "short window": (700, 700, Band(100, 0)),
    "short window, two-sided": (300, 420, Band(40, 160)),
    "long window": (800, 760, Band(450, 20)),
    "window that only starts to bind": (600, 600, Band(590, 0)),
    "causal": (700, 500, Band(right=100)),
    "anti-causal": (500, 700, Band(left=100)),
    "causal, short": (512, 512, CAUSAL),
    "causal, short and odd": (511, 511, CAUSAL),
    "anti-causal, short": (512, 512, Band(left=0)),
    "causal, short, shifted": (512, 600, Band(right=88)),
    "causal, just too long to split": (513, 513, CAUSAL),
}
HALF_TYPES = (torch.bfloat16, torch.float16)
HALVES = [
    pytest.param(dtype, TILES[name], id=f"{name}-{dtype}")
    for name in ("full", "causal", "anti-causal", "window")
    for dtype in HALF_TYPES
]
HALVES += [  # either type by turns
    pytest.param(HALF_TYPES[at % 2], tile, id=f"long: {name}-{HALF_TYPES[at % 2]}")
    for at, (name, tile) in enumerate(LONG_TILES.items())
]


@dataclass(frozen=True)
class Case:
    """One tile and the gradient of its output, as the executor holds them."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    band: Band

    def double(self) -> Case:
        q, k, v, dout = (x.double() for x in (self.q, self.k, self.v, self.dout))
        return Case(q, k, v, dout, self.band)


def make_case(
    tile: tuple[int, int, Band],
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    dtype: torch.dtype = torch.float64,
    batch: int = 2,
) -> Case:
    """Random rows-first buffers, K beside V, seen batch-first: the strides of the executor."""
    rows, keys, band = tile
    random = torch.Generator().manual_seed(rows + 1000 * keys + head_dim)
    h, g = heads
    q, dout = torch.randn(2, rows, batch, h, head_dim, generator=random).to(dtype)
    kv = torch.randn(keys, 2, batch, g, head_dim, generator=random).to(dtype)
    q, k, v, dout = (x.permute(1, 0, 2, 3) for x in (q, kv[:, 0], kv[:, 1], dout))
    return Case(q, k, v, dout, band)


def dense_mask(rows: int, keys: int, band: Band) -> Tensor:
    offset = torch.arange(keys)[None, :] - torch.arange(rows)[:, None]
    return (-band.left <= offset) & (offset <= band.right)


def dense(case: Case) -> tuple[Tensor, Tensor, list[Tensor]]:
    """out, lse, gradients of q, k, v by autograd, in the dtype of the case."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (case.q, case.k, case.v))
    group = q.shape[2] // k.shape[2]
    k_all, v_all = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k_all) * SCALE
    scores = scores.masked_fill(~dense_mask(q.shape[1], k.shape[1], case.band), -torch.inf)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v_all)
    grads = torch.autograd.grad(out, (q, k, v), case.dout)
    return out.detach(), scores.logsumexp(-1).detach(), list(grads)


def kernel_named(name: str, case: Case) -> Kernel:
    heads, kv_heads, head_dim = case.q.shape[2], case.k.shape[2], case.q.shape[3]
    return select(name, KernelSpec("cpu", case.q.dtype, head_dim, heads, kv_heads))


def delta_of(dout: Tensor, out: Tensor) -> Tensor:
    return (dout.double() * out.double()).sum(-1).transpose(1, 2)


def run(name: str, case: Case, scores: Scores = SCORES) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The same as `dense`, by a kernel; its own lse and delta are the whole row's here."""
    kernel = kernel_named(name, case)
    q, k, v, dout = case.q, case.k, case.v, case.dout
    out, lse = kernel.forward(q, k, v, scores, case.band)
    delta = delta_of(dout, out).to(lse.dtype)
    grads = kernel.backward(TileGrad(dout, q, k, v, out, lse, delta), scores, case.band)
    return out, lse, list(grads)


def error(value: Tensor, expected: Tensor) -> float:
    """Relative to the expected values, all together."""
    assert value.shape == expected.shape
    return float((value.double() - expected.double()).norm() / expected.double().norm())


def errors(results: tuple[Tensor, Tensor, list[Tensor]], case: Case) -> list[float]:
    """Of out, dq, dk, dv and lse against the dense softmax in float64."""
    out, lse, grads = results
    dense_out, dense_lse, dense_grads = dense(case.double())
    pairs = zip([out, *grads, lse], [dense_out, *dense_grads, dense_lse], strict=True)
    return [error(value, expected) for value, expected in pairs]


def sees_one_key_each(case: Case) -> bool:
    """Then the softmax is 1 whatever q and k are, and dq and dk are zero."""
    mask = dense_mask(case.q.shape[1], case.k.shape[1], case.band)
    return bool((mask.sum(1) == 1).all())


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES.keys())
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("name, dtype, tolerance", EXACT)
def test_kernel_is_the_dense_softmax(name, dtype, tolerance, heads, tile):
    case = make_case(tile, heads, dtype=dtype)
    results = run(name, case)
    if sees_one_key_each(case):
        out, lse, (dq, dk, dv) = results
        size = float(case.dout.abs().max())
        assert float(dq.abs().max()) < 50 * tolerance * size
        assert float(dk.abs().max()) < 50 * tolerance * size
        dense_out, dense_lse, dense_grads = dense(case.double())
        assert error(out, dense_out) < tolerance
        assert error(lse, dense_lse) < tolerance
        assert error(dv, dense_grads[2]) < tolerance
    else:
        assert largest(errors(results, case)) < tolerance


@pytest.mark.parametrize("tile", LONG_TILES.values(), ids=LONG_TILES.keys())
@pytest.mark.parametrize("name, dtype, tolerance", EXACT)
def test_long_tiles_that_are_cut_into_blocks(name, dtype, tolerance, tile):
    for batch in (1, 2):  # rows of one sequence lie evenly apart; those of two do not
        case = make_case(tile, heads=(2, 1), dtype=dtype, batch=batch)
        assert largest(errors(run(name, case), case)) < tolerance


@pytest.mark.parametrize("head_dim", [16, 24, 64, 80, 128, 256])
@pytest.mark.parametrize("name, dtype, tolerance", EXACT)
def test_head_dims(name, dtype, tolerance, head_dim):
    case = make_case((24, 40, Band(10, 20)), head_dim=head_dim, dtype=dtype)
    case = replace(case, q=case.q / (SCALE * sqrt(head_dim)))  # logits of variance 1, as in models
    assert largest(errors(run(name, case), case)) < tolerance


@pytest.mark.parametrize("tile", ["causal", "window", "anti-causal, shifted"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["reference", "sdpa"])
def test_large_logits_stay_finite(name, dtype, tile):
    case = make_case(TILES[tile], dtype=dtype, head_dim=64)
    case = replace(case, q=case.q * 40)
    out, lse, grads = run(name, case)
    assert float(lse.abs().max()) > 88  # exp would overflow float32
    assert all(bool(x.isfinite().all()) for x in (out, lse, *grads))
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4}.get(dtype, 2e-2)
    assert error(out, dense(case.double())[0]) < tolerance


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference_returns_the_dtype_it_computes_in(dtype):
    case = make_case(TILES["causal"], dtype=dtype)
    out, lse, grads = run("reference", case)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {x.dtype for x in (out, lse, *grads)} == {wide}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile", ["full", "causal", "window"])
def test_lse_of_sdpa_is_never_half(dtype, tile):
    case = make_case(TILES[tile], dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert run("sdpa", case)[1].dtype == wide


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("scores", (SCORES, Scores(2.0, 0.5, torch.rand(4))), ids=("plain", "all"))
def test_the_reference_computes_rows_in_blocks(monkeypatch, tile, scores):
    """Blocks of about three rows give what one block gives."""
    case = make_case(TILES[tile])
    rows, keys, band = TILES[tile]
    scores = scores.at_positions(torch.arange(7, 7 + rows), torch.arange(keys))
    whole = run("reference", case, scores)
    monkeypatch.setattr(reference, "BLOCK_SCORES", 3 * 2 * 4 * keys)
    parts = run("reference", case, scores)
    for one, other in zip((*whole[:2], *whole[2]), (*parts[:2], *parts[2]), strict=True):
        assert (one - other).abs().max() < 1e-13


@pytest.mark.parametrize("name, dtype, tolerance", EXACT)
@pytest.mark.parametrize("band", [FULL, CAUSAL, Band(30, 0), Band(12, 7)], ids=str)
def test_tiles_of_a_row_add_up_with_the_lse_and_delta_of_the_row(name, dtype, tolerance, band):
    """Keys cut in two: forwards merge by lse, backwards get the row's lse and delta and add up."""
    case = make_case((48, 48, band), dtype=dtype)
    kernel, q, dout, half = kernel_named(name, case), case.q, case.dout, 24
    tiles = []
    for start in (0, half):
        rows = [
            i
            for i in range(48)
            if any((-band.left <= j - i <= band.right) for j in range(start, start + half))
        ]
        tiles.append((slice(rows[0], rows[-1] + 1), slice(start, start + half)))
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf, dtype=dtype)
    for r, c in tiles:
        local = band.shift(c.start - r.start)
        part, part_lse = kernel.forward(q[:, r], case.k[:, c], case.v[:, c], SCORES, local)
        merge(out[:, r], lse[:, r], part, part_lse.transpose(1, 2))
    row_lse, delta = lse.transpose(1, 2), delta_of(dout, out).to(dtype)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, case.k, case.v))
    for r, c in tiles:
        k, v, local = case.k[:, c], case.v[:, c], band.shift(c.start - r.start)
        stats = out[:, r], row_lse[:, :, r], delta[:, :, r]
        grads = kernel.backward(TileGrad(dout[:, r], q[:, r], k, v, *stats), SCORES, local)
        for total, part in zip((dq[:, r], dk[:, c], dv[:, c]), grads, strict=True):
            total += part
    assert largest(errors((out, row_lse, [dq, dk, dv]), case)) < tolerance


@pytest.mark.parametrize("tile", ["full", "causal", "window", "anti-causal, shifted"])
@pytest.mark.parametrize("name", ["reference", "sdpa"])
def test_strides_change_nothing_and_inputs_are_left_alone(name, tile):
    case = make_case(TILES[tile], dtype=torch.float32)
    tensors = case.q, case.k, case.v, case.dout
    assert not any(x.is_contiguous() for x in tensors)
    before = [x.clone() for x in tensors]
    strided = run(name, case)
    contiguous = run(name, Case(*(x.contiguous() for x in tensors), case.band))
    for a, b in zip([*strided[:2], *strided[2]], [*contiguous[:2], *contiguous[2]], strict=True):
        assert error(a, b) < 1e-6
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))


def torch_errors(case: Case) -> list[float]:
    """Errors of out, dq, dk, dv of torch's own attention in the dtype of the case."""
    q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in (case.q, case.k, case.v))
    mask = dense_mask(q.shape[2], k.shape[2], case.band)
    options = {"is_causal": True} if case.band == CAUSAL else {"attn_mask": mask}
    options = {} if case.band == FULL else options
    out = F.scaled_dot_product_attention(q, k, v, scale=SCALE, enable_gqa=True, **options)
    grads = torch.autograd.grad(out, (q, k, v), case.dout.transpose(1, 2))
    dense_out, _, dense_grads = dense(case.double())
    values = [x.transpose(1, 2) for x in (out.detach(), *grads)]
    return [error(a, b) for a, b in zip(values, [dense_out, *dense_grads], strict=True)]


@pytest.mark.parametrize(("dtype", "tile"), HALVES)
def test_half_precision_is_as_good_as_torch_s_own(tile, dtype):
    case = make_case(tile, heads=(2, 1), head_dim=64, dtype=dtype)
    theirs = torch_errors(case)
    for name in ("sdpa", "reference"):
        ours = errors(run(name, case), case)[:4]
        assert all(mine <= 1.5 * torchs for mine, torchs in zip(ours, theirs, strict=True)), name
