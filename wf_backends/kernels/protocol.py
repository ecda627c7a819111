"""What every attention kernel takes and gives.

Shapes: b batch, i query rows, j key rows, h query heads, g key heads (g divides h), d head_dim of
queries and keys, e of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from wf_backends.kernels.scores import Scores
from wf_backends.schedule import Band


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """What a kernel is asked to work on; all that a choice between kernels may look at."""

    device: str
    """torch device type: "cpu" or "cuda"."""
    dtype: torch.dtype
    head_dim: int
    heads: int
    kv_heads: int
    value_dim: int | None = None
    """head_dim of the values; None = that of queries and keys."""
    softcap: bool = False
    alibi: bool = False
    dropout: bool = False
    position_bias: bool = False
    looks_back: bool = False
    """Whether no row sees a later key."""
    whole: bool = False
    """Whether a rank computes the whole sequence for some heads: its tiles are the same on every
    number of ranks, and in the backward."""

    @property
    def widest(self) -> int:
        """The larger head_dim, to which libraries that have one get the other filled up."""
        return max(self.head_dim, self.value_dim or 0)


OPTIONS = ("softcap", "alibi", "dropout", "position_bias")
"""Fields of a spec that only some kernels know."""


@cache  # asked for every tile
def torch_release() -> tuple[int, int]:
    """(2, 13) for torch 2.13.0."""
    major, minor, *_ = torch.__version__.split(".")
    return int(major), int(minor)


FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_HEAD_DIM = 256  # the largest
FLASH_CAPABILITY = (8, 0)  # the oldest GPUs: Ampere


def flash_refuses(spec: KernelSpec) -> str | None:
    """Why neither flash-attn nor torch's copy of it runs a head_dim, or on the current GPU."""
    if spec.widest % 8 or spec.widest > FLASH_HEAD_DIM:
        return f"head_dim must be a multiple of 8 up to {FLASH_HEAD_DIM}, got {spec.widest}"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() >= FLASH_CAPABILITY:
        return None
    has = torch.cuda.get_device_capability()
    return f"flash kernels need compute capability {FLASH_CAPABILITY} or later, this GPU has {has}"


def lacks(spec: KernelSpec, library: str, *options: str) -> str | None:
    """Which of the options that `spec` asks for a library (a plural) does not have."""
    asked = [name for name in OPTIONS if getattr(spec, name) and name not in options]
    return f"{library} have no {' and no '.join(asked)}" if asked else None


Grads = tuple[Tensor, Tensor, Tensor]
"""dq, dk, dv."""


class TileGrad(NamedTuple):
    """What the backward of one tile needs.

    out, lse and delta are those of the whole rows, which meet other keys in other tiles.
    """

    dout: Tensor
    """(b, i, h, e), the gradient of the whole rows' output."""
    q: Tensor
    """(b, i, h, d)."""
    k: Tensor
    """(b, j, g, d)."""
    v: Tensor
    """(b, j, g, e)."""
    out: Tensor
    """(b, i, h, e), the whole rows' output, or any tensor with rowsum(dout * out) == delta."""
    lse: Tensor
    """(b, h, i), of the whole rows."""
    delta: Tensor
    """(b, h, i), rowsum(dout * out)."""

    def part(self, rows: slice, keys: slice) -> TileGrad:
        """Some of its rows and keys."""
        dout, q, k, v, out, lse, delta = self
        k, v, lse, delta = k[:, keys], v[:, keys], lse[:, :, rows], delta[:, :, rows]
        return TileGrad(dout[:, rows], q[:, rows], k, v, out[:, rows], lse, delta)

    def reversed(self) -> TileGrad:
        """The last row and the last key first."""
        dout, q, k, v, out = (x.flip(1) for x in self[:5])
        return TileGrad(dout, q, k, v, out, self.lse.flip(2), self.delta.flip(2))


class Kernel(Protocol):
    """One tile of attention: rows x keys under a Band in the tile's own indices.

    The executor only asks for trimmed tiles: every row sees a key and every key is seen.
    Row i sees key j if and only if -band.left <= j - i <= band.right.
    """

    name: str

    def refuses(self, spec: KernelSpec) -> str | None:
        """Why this kernel cannot run `spec` here, in words for the user; None if it can."""
        ...

    def runs(self, spec: KernelSpec) -> str:
        """What computes the tiles of a `spec` that is not refused, in words for the user."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band
    ) -> tuple[Tensor, Tensor]:
        """Attention of one tile.

        Args:
            q: (b, i, h, d). k: (b, j, g, d). v: (b, j, g, e). Any strides with the
                last dim contiguous.

        Returns:
            out (b, i, h, e), any float dtype; lse (b, h, i), natural log, float32 (float64 for
            float64 inputs), any strides.
        """
        ...

    def backward(self, tile: TileGrad, scores: Scores, band: Band) -> Grads:
        """Gradients of one tile.

        Returns:
            dq (b, i, h, d), dk (b, j, g, d), dv (b, j, g, e), any float dtype.

        Source: FlashAttention-2 (arXiv 2307.08691), algorithm 2.
        """
        ...
