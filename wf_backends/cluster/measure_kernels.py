"""The rate of the kernel on the running job, and what each of its calls costs without FLOPs."""

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

Seconds = Callable[[Work, float], float]  # of one run, from series of at least so many seconds


@dataclass(frozen=True, slots=True)
class TileSizes:
    """Rows (and as many keys) of the tiles that are timed."""

    small: int
    """Of the smaller of the two tiles by whose times the rate is fitted."""
    large: int
    diagonal: int
    """Of the causal tile."""
    overlapped: int
    """Of the tile that is computed while messages travel."""
    heads: int
    series_s: float
    """Seconds for which equal tiles are computed in a series, at least."""


CPU = TileSizes(16, 768, 512, 128, heads=4, series_s=0.15)
GPU = TileSizes(1024, 8192, 1024, 1024, heads=8, series_s=0.02)


class KernelTimer:
    """Times tiles of the kernel that "auto" selects, as a call of attention computes them.

    Merging into earlier results is part of a tile: on a CPU most of the time of a small one.
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
        """The rate: FLOP/s and call_s by two tiles' times, diagonal_keys by a causal tile's."""
        small, large = (self.tiles(rows) for rows in (self.sizes.small, self.sizes.large))
        forward, forward_call_s = self._fit_line(seconds, small[0], large[0], 1.0)
        backward, backward_call_s = self._fit_line(seconds, small[1], large[1], BACKWARD_FLOPS)
        rate = KernelRate(forward, backward, max(1e-7, (forward_call_s + backward_call_s) / 2))
        return replace(rate, diagonal_keys=self._diagonal_keys(rate, seconds))

    def _fit_line(
        self, seconds: Seconds, small: Work, large: Work, flops_ratio: float
    ) -> tuple[float, float]:
        """(FLOP/s, seconds of a call) by two tiles' times. FLOPs: flops_ratio x the forward's."""
        sizes = self.sizes
        small_s, large_s = (seconds(tile, sizes.series_s) for tile in (small, large))
        small_flops, large_flops = (
            flops_ratio * rows**2 * self.flops_per_score for rows in (sizes.small, sizes.large)
        )
        rate = (large_flops - small_flops) / max(large_s - small_s, large_s / 10)
        return rate, small_s - small_flops / rate

    def _diagonal_keys(self, rate: KernelRate, seconds: Seconds) -> float:
        """Masked keys computed for each row of a causal tile.

        By the time that forward and backward take beyond their calls and the unmasked scores.
        """
        rows = self.sizes.diagonal
        forward, backward = self.tiles(rows, CAUSAL)
        both_s = seconds(lambda: (forward(), backward()), self.sizes.series_s) - 2 * rate.call_s
        flop_s = 1 / rate.forward_flops_per_s + BACKWARD_FLOPS / rate.backward_flops_per_s
        scores = both_s / (self.flops_per_score * flop_s)
        return max(0.0, scores - tile_area(_tile(rows, CAUSAL))) / rows

    def tiles(self, size: int, band: Band = FULL) -> tuple[Work, Work]:
        """(forward, backward) of a tile of `size` rows and keys: functions that have run once."""
        tile, scores = _tile(size, band), Scores(HEAD_DIM**-0.5)
        generator = torch.Generator().manual_seed(0)  # not the default one, which is the user's
        shape = (size, 1, self.sizes.heads, HEAD_DIM)  # (rows, batch, heads, head_dim)
        q, k, v, dout = (
            torch.randn(shape, generator=generator).to(self.device, self.dtype) for _ in range(4)
        )
        kv = fuse(*(x.transpose(0, 1) for x in (k, v)))
        forward_tiles = ForwardTiles(self.kernel, scores, HEAD_DIM)
        wide = accumulator_dtype(self.dtype)
        out, lse = q.new_zeros(shape, dtype=wide), q.new_full(shape[:-1], -inf, dtype=wide)
        forward = partial(forward_tiles, tile, (q,), (kv,), (out, lse), ())
        forward()
        delta = (dout.to(lse.dtype) * out).sum(-1)
        queries = q, dout, torch.stack((lse, delta), dim=1)
        surrogate = SurrogateOut(dout, out.to(self.dtype))
        backward_tiles = BackwardTiles(self.kernel, scores, HEAD_DIM, surrogate)
        grads = (torch.zeros_like(out),), (torch.zeros_like(kv, dtype=wide),)
        backward = partial(backward_tiles, tile, queries, (kv,), *grads)
        backward()
        return forward, backward


def _tile(size: int, band: Band) -> Tile:
    return Tile(((0, size),), ((0, size),), band)
