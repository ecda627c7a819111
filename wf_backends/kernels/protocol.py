"""The interface of attention kernels.

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
    """The properties of an attention call by which a kernel is selected."""

    device: str  # torch device type: "cpu" or "cuda"
    dtype: torch.dtype
    head_dim: int
    heads: int
    kv_heads: int
    value_dim: int | None = None  # head_dim of the values; None = that of queries and keys
    softcap: bool = False
    alibi: bool = False
    dropout: bool = False
    position_bias: bool = False
    looks_back: bool = False  # whether no row sees a later key

    @property
    def max_head_dim(self) -> int:
        """The larger of head_dim and value_dim; see SplitKernel, which fills up the smaller one."""
        return max(self.head_dim, self.value_dim or 0)


OPTIONS = ("softcap", "alibi", "dropout", "position_bias")  # that only some kernels support


@cache  # called for every tile
def torch_release() -> tuple[int, int]:
    """(2, 13) for torch 2.13.0."""
    major, minor, *_ = torch.__version__.split(".")
    return int(major), int(minor)


FLASH_DTYPES = (torch.bfloat16, torch.float16)
MAX_FLASH_HEAD_DIM = 256
MIN_FLASH_CAPABILITY = (8, 0)  # Ampere


def flash_refuses(spec: KernelSpec) -> str | None:
    """Why flash-attn and torch's copy of it refuse the head_dim or the GPU; None if they do not."""
    head_dim = spec.max_head_dim
    if head_dim % 8 or head_dim > MAX_FLASH_HEAD_DIM:
        return f"head_dim must be a multiple of 8 up to {MAX_FLASH_HEAD_DIM}, got {head_dim}"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() >= MIN_FLASH_CAPABILITY:
        return None
    need = f"compute capability {MIN_FLASH_CAPABILITY} or later"
    return f"flash kernels need {need}, this GPU has {torch.cuda.get_device_capability()}"


def lacks(spec: KernelSpec, library: str, *supported: str) -> str | None:
    """Which options of `spec` a library (a plural noun) does not support; None if it has all."""
    missing = [name for name in OPTIONS if getattr(spec, name) and name not in supported]
    return f"{library} have no {' and no '.join(missing)}" if missing else None


OutLse = tuple[Tensor, Tensor]
"""out, lse."""
Grads = tuple[Tensor, Tensor, Tensor]
"""dq, dk, dv."""


class TileGrad(NamedTuple):
    """The inputs of the backward of one tile.

    dout, out, lse and delta belong to the whole rows: to the softmax over the keys of all tiles.
    """

    dout: Tensor
    """(b, i, h, e), the gradient of the rows' output."""
    q: Tensor
    """(b, i, h, d)."""
    k: Tensor
    """(b, j, g, d)."""
    v: Tensor
    """(b, j, g, e)."""
    out: Tensor
    """(b, i, h, e), the rows' output, or any tensor with rowsum(dout * out) == delta."""
    lse: Tensor
    """(b, h, i), natural log."""
    delta: Tensor
    """(b, h, i), rowsum(dout * out)."""

    def part(self, rows: slice, keys: slice) -> TileGrad:
        """The inputs for some rows and keys of the tile."""
        dout, q, k, v, out, lse, delta = self
        k, v, lse, delta = k[:, keys], v[:, keys], lse[:, :, rows], delta[:, :, rows]
        return TileGrad(dout[:, rows], q[:, rows], k, v, out[:, rows], lse, delta)

    def reversed(self) -> TileGrad:
        """The tile with its rows and its keys in reverse order."""
        dout, q, k, v, out = (x.flip(1) for x in self[:5])
        return TileGrad(dout, q, k, v, out, self.lse.flip(2), self.delta.flip(2))


class TileKernel(Protocol):
    """One tile of attention: rows x keys under a Band in the tile's own indices.

    The runtime passes only trimmed tiles: every row sees a key and every key is seen.
    Row i sees key j if and only if -band.left <= j - i <= band.right.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band) -> OutLse:
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


class Kernel(TileKernel, Protocol):
    """A kernel that `select` may choose."""

    name: str

    def refuses(self, spec: KernelSpec) -> str | None:
        """Why this kernel cannot run `spec` on this machine, for an error; None if it can."""
        ...

    def runs(self, spec: KernelSpec) -> str:
        """Which library computes the tiles of a `spec` that is not refused, for the user."""
        ...
