"""One tile of attention: its tensors, a dense softmax as the reference, and a kernel's errors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wf_backends.kernels import Kernel, KernelSpec, Scores, TileGrad, select
from wf_backends.schedule.mask import CAUSAL, FULL, Band

SCALE = 0.3
SCORES = Scores(SCALE)

# Name -> (rows, keys, band). Every tile is trimmed, as those of a program are.
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
    "one row": (1, 24, FULL),
}
ONE_KEY_TILES = {
    "window of one": (24, 24, Band(0, 0)),
    "one key": (24, 1, FULL),
    "one row and key": (1, 1, CAUSAL),
}
"""Each row sees one key: its softmax is 1 whatever q and k are, and dq and dk are zero."""
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
"""Tiles that kernels split into blocks, or just do not."""

Results = tuple[Tensor, Tensor, list[Tensor]]
"""(out, lse, [dq, dk, dv])."""


@dataclass(frozen=True)
class Case:
    """One tile and the gradient of its output, as the runtime holds them."""

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
    """Random rows-first buffers, K beside V, seen batch-first: the strides of the runtime.

    Args:
        heads: (query heads, key heads).
    """
    rows, keys, band = tile
    random = torch.Generator().manual_seed(rows + 1000 * keys + head_dim)
    h, g = heads
    q, dout = torch.randn(2, rows, batch, h, head_dim, generator=random).to(dtype)
    kv = torch.randn(keys, 2, batch, g, head_dim, generator=random).to(dtype)
    q, k, v, dout = (x.permute(1, 0, 2, 3) for x in (q, kv[:, 0], kv[:, 1], dout))
    return Case(q, k, v, dout, band)


def dense_mask(rows: int, keys: int, band: Band) -> Tensor:
    """(rows, keys) bool: which row sees which key."""
    offset = torch.arange(keys)[None, :] - torch.arange(rows)[:, None]
    return (-band.left <= offset) & (offset <= band.right)


def dense(case: Case) -> Results:
    """The reference: a dense softmax and its gradients by autograd, in the dtype of the case."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (case.q, case.k, case.v))
    group = q.shape[2] // k.shape[2]
    k_all, v_all = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k_all) * SCALE
    scores = scores.masked_fill(~dense_mask(q.shape[1], k.shape[1], case.band), -torch.inf)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v_all)
    grads = torch.autograd.grad(out, (q, k, v), case.dout)
    return out.detach(), scores.logsumexp(-1).detach(), list(grads)


def kernel_named(name: str, case: Case) -> Kernel:
    """The kernel for tiles like this on a CPU."""
    heads, kv_heads, head_dim = case.q.shape[2], case.k.shape[2], case.q.shape[3]
    return select(name, KernelSpec("cpu", case.q.dtype, head_dim, heads, kv_heads))


def delta_of(dout: Tensor, out: Tensor) -> Tensor:
    """(b, h, i) float64: rowsum(dout * out)."""
    return (dout.double() * out.double()).sum(-1).transpose(1, 2)


def run(name: str, case: Case, scores: Scores = SCORES) -> Results:
    """The results of a kernel. Rows have no other keys: lse and delta are those of the tile."""
    kernel = kernel_named(name, case)
    q, k, v, dout = case.q, case.k, case.v, case.dout
    out, lse = kernel.forward(q, k, v, scores, case.band)
    delta = delta_of(dout, out).to(lse.dtype)
    grads = kernel.backward(TileGrad(dout, q, k, v, out, lse, delta), scores, case.band)
    return out, lse, list(grads)


def error(actual: Tensor, expected: Tensor) -> float:
    """norm(actual - expected) / norm(expected)"""
    assert actual.shape == expected.shape
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def errors(results: Results, case: Case) -> list[float]:
    """The errors of out, dq, dk, dv and lse against the dense softmax in float64."""
    out, lse, grads = results
    expected_out, expected_lse, expected_grads = dense(case.double())
    pairs = zip([out, *grads, lse], [expected_out, *expected_grads, expected_lse], strict=True)
    return [error(actual, expected) for actual, expected in pairs]
