"""What a rank's tiles take on the running job: the kernel's rates, and what each call costs beside.

Shapes: s rows of a tile, b batch, h heads, d head_dim; buffers are rows-first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf

import torch

from wf_backends.cluster.timer import Work
from wf_backends.cluster.topology import KernelRate
from wf_backends.kernels import Kernel, KernelSpec, select
from wf_backends.lowering import BACKWARD_FLOPS, Tile, tile_area
from wf_backends.runtime import BackwardTiles, ForwardTiles, SurrogateOut, accumulator_dtype
from wf_backends.schedule import CAUSAL, FULL, Band

HEAD_DIM = 64

Timed = Callable[[Work, float], float]  # seconds of one of a row that takes so long at least


@dataclass(frozen=True, slots=True)
class Sizes:
    """Rows and keys of the tiles that are timed."""

    small: int
    """With `large` one of the two that a kernel's rate is fitted to."""
    large: int
    diagonal: int
    """Of a causal tile."""
    beside: int
    """Of tiles computed while messages travel."""
    heads: int
    row_s: float
    """How long tiles are computed in a row, at least."""


CPU = Sizes(16, 768, 512, 128, heads=4, row_s=0.15)
GPU = Sizes(1024, 8192, 1024, 1024, heads=8, row_s=0.02)


class KernelBench:
    """Times the kernel that "auto" takes, by tiles as the executor runs them.

    They are merged into results that are there: on a CPU that is most of what short ones take.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.device, self.sizes = device, GPU if on_gpu else CPU
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        heads = self.sizes.heads
        spec = KernelSpec(device.type, self.dtype, HEAD_DIM, heads, heads)
        self.kernel: Kernel = select("auto", spec).kernel

    def rate(self, seconds: Timed) -> KernelRate:
        """A line through two tiles' times, and what a causal one takes beyond it."""
        sizes, lines = self.sizes, list[tuple[float, float]]()
        flops = [size * size * self._score_flops for size in (sizes.small, sizes.large)]
        works = zip(self.works(sizes.small), self.works(sizes.large), strict=True)
        for factor, both in zip((1.0, BACKWARD_FLOPS), works, strict=True):
            first, second = (seconds(work, sizes.row_s) for work in both)
            rate = factor * (flops[1] - flops[0]) / max(second - first, second / 10)
            lines.append((rate, first - factor * flops[0] / rate))
        (forward, there), (backward, back) = lines
        rate = KernelRate(forward, backward, max(1e-7, (there + back) / 2))
        return KernelRate(forward, backward, rate.call_s, self._diagonal_keys(rate, seconds))

    def works(self, size: int, band: Band = FULL) -> tuple[Work, Work]:
        """The (forward, backward) of a tile of so many rows and keys, as the executor runs it.

        Both have run once: what a first call takes beyond others is in no measured time.
        """
        tile, scale = _tile(size, band), HEAD_DIM**-0.5
        source = torch.Generator().manual_seed(0)  # the program's own is left alone
        shape = (size, 1, self.sizes.heads, HEAD_DIM)
        q, k, v, dout = (
            torch.randn(shape, generator=source).to(self.device, self.dtype) for _ in range(4)
        )
        kv = torch.stack((k, v), 1)
        there = ForwardTiles(self.kernel, scale)
        wide = accumulator_dtype(self.dtype)
        out, lse = q.new_zeros(shape, dtype=wide), q.new_full(shape[:-1], -inf, dtype=wide)
        forward = partial(there, tile, (q,), (kv,), (out, lse), ())
        forward()
        delta = (dout.to(lse.dtype) * out).sum(-1)
        queries = q, dout, torch.stack((lse, delta), dim=1)
        back = BackwardTiles(self.kernel, scale, SurrogateOut(dout, out.to(self.dtype)))
        grads = (torch.zeros_like(out),), (torch.zeros_like(kv, dtype=wide),)
        backward = partial(back, tile, queries, (kv,), *grads)
        backward()
        return forward, backward

    def _diagonal_keys(self, rate: KernelRate, seconds: Timed) -> float:
        """Keys that a row of a causal tile is computed with in vain, by what forward and backward
        take beyond their calls and the scores that the mask lets through."""
        size = self.sizes.diagonal
        there, back = self.works(size, CAUSAL)
        took = seconds(lambda: (there(), back()), self.sizes.row_s) - 2 * rate.call_s
        score_s = 1 / rate.forward_flops_per_s + BACKWARD_FLOPS / rate.backward_flops_per_s
        scores = took / (self._score_flops * score_s)
        return max(0.0, scores - tile_area(_tile(size, CAUSAL))) / size

    @property
    def _score_flops(self) -> int:
        """The forward's, of one (query, key) pair, all heads."""
        return 4 * self.sizes.heads * HEAD_DIM


def _tile(size: int, band: Band) -> Tile:
    return Tile(((0, size),), ((0, size),), band)
