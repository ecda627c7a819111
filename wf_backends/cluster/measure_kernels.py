"""The rates of the kernel on the running job, and what each call of it costs beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import torch

from wf_backends.cluster.timer import Work
from wf_backends.cluster.topology import KernelRate
from wf_backends.kernels import Kernel, KernelSpec, Scores, select
from wf_backends.lowering import BACKWARD_FLOPS, Tile, tile_area
from wf_backends.runtime import BackwardTiles, ForwardTiles, SurrogateOut, accumulator_dtype, fuse
from wf_backends.schedule import CAUSAL, FULL, Band

HEAD_DIM = 64

Seconds = Callable[[Work, float], float]  # of one run, from rows that take so long at least


@dataclass(frozen=True, slots=True)
class Sizes:
    """Rows (and as many keys) of the tiles that are timed."""

    small: int
    """With `large` the two tiles that a kernel's rate is fitted to."""
    large: int
    diagonal: int
    """The causal tile."""
    beside: int
    """The tile that is computed while messages travel."""
    heads: int
    row_s: float
    """How long a row of equal tiles is computed, at least."""


CPU = Sizes(16, 768, 512, 128, heads=4, row_s=0.15)
GPU = Sizes(1024, 8192, 1024, 1024, heads=8, row_s=0.02)


class KernelTimer:
    """Times tiles of the kernel that "auto" selects, as a run computes them.

    Merging into earlier results is part of it: on a CPU most of the time of a small tile.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.device, self.sizes = device, GPU if on_gpu else CPU
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        heads = self.sizes.heads
        spec = KernelSpec(device.type, self.dtype, HEAD_DIM, heads, heads)
        self.kernel: Kernel = select("auto", spec)
        self.name = self.kernel.name
        self.flops_per_score = 4 * heads * HEAD_DIM  # of the forward, per (query, key)

    def rate(self, seconds: Seconds) -> KernelRate:
        """Rates and call from the times of two tiles, diagonal_keys from that of a causal one."""
        small, large = (self.tiles(rows) for rows in (self.sizes.small, self.sizes.large))
        forward, forward_call = self._line(seconds, small[0], large[0], 1.0)
        backward, backward_call = self._line(seconds, small[1], large[1], BACKWARD_FLOPS)
        rate = KernelRate(forward, backward, max(1e-7, (forward_call + backward_call) / 2))
        return replace(rate, diagonal_keys=self._diagonal_keys(rate, seconds))

    def _line(
        self, seconds: Seconds, small: Work, large: Work, factor: float
    ) -> tuple[float, float]:
        """(FLOP/s, seconds of a call) of the line through two tiles' times."""
        sizes = self.sizes
        small_s, large_s = (seconds(tile, sizes.row_s) for tile in (small, large))
        small_flops, large_flops = (
            factor * rows**2 * self.flops_per_score for rows in (sizes.small, sizes.large)
        )
        rate = (large_flops - small_flops) / max(large_s - small_s, large_s / 10)
        return rate, small_s - small_flops / rate

    def _diagonal_keys(self, rate: KernelRate, seconds: Seconds) -> float:
        """Masked keys computed for each row of a causal tile.

        By what forward and backward take beyond their calls and the scores that the mask shows.
        """
        rows = self.sizes.diagonal
        forward, backward = self.tiles(rows, CAUSAL)
        took = seconds(lambda: (forward(), backward()), self.sizes.row_s) - 2 * rate.call_s
        score_s = 1 / rate.forward_flops_per_s + BACKWARD_FLOPS / rate.backward_flops_per_s
        scores = took / (self.flops_per_score * score_s)
        return max(0.0, scores - tile_area(_tile(rows, CAUSAL))) / rows

    def tiles(self, size: int, band: Band = FULL) -> tuple[Work, Work]:
        """The (forward, backward) of a tile of `size` rows and keys; each has run once already."""
        tile, scores = _tile(size, band), Scores(HEAD_DIM**-0.5)
        source = torch.Generator().manual_seed(0)  # the program's own is left alone
        shape = (size, 1, self.sizes.heads, HEAD_DIM)
        q, k, v, dout = (
            torch.randn(shape, generator=source).to(self.device, self.dtype) for _ in range(4)
        )
        kv = fuse(*(x.transpose(0, 1) for x in (k, v)))
        there = ForwardTiles(self.kernel, scores, HEAD_DIM)
        wide = accumulator_dtype(self.dtype)
        out, lse = q.new_zeros(shape, dtype=wide), q.new_full(shape[:-1], -inf, dtype=wide)
        forward = partial(there, tile, (q,), (kv,), (out, lse), ())
        forward()
        delta = (dout.to(lse.dtype) * out).sum(-1)
        queries = q, dout, torch.stack((lse, delta), dim=1)
        back = BackwardTiles(self.kernel, scores, HEAD_DIM, SurrogateOut(dout, out.to(self.dtype)))
        grads = (torch.zeros_like(out),), (torch.zeros_like(kv, dtype=wide),)
        backward = partial(back, tile, queries, (kv,), *grads)
        backward()
        return forward, backward


def _tile(size: int, band: Band) -> Tile:
    return Tile(((0, size),), ((0, size),), band)
