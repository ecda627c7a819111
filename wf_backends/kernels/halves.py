"""A causal square in triangles and squares, for a kernel that computes much that a diagonal hides.

Blocks along the diagonal are causal by themselves. Two neighbours and the square between them, the
later one's rows on the earlier one's keys, are a block of twice the size, and so on to the whole.
All blocks of a size are one batch, so a square of n rows takes log2(n / block) + 1 calls.

Shapes: b batch, n rows and keys, h query heads, g key heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from wf_backends.kernels.merge import merge_
from wf_backends.kernels.protocol import Grads, TileGrad
from wf_backends.kernels.split_run import Backward, Forward
from wf_backends.schedule import CAUSAL, FULL, Band

BLOCK = 256
"""Rows of the blocks along the diagonal, at most. Measured in docs/kernels.md."""

MOST_ROWS: Mapping[torch.dtype, int] = MappingProxyType({torch.float32: 4096})
USUALLY = 2048
"""Rows of a square beyond which the scores that blocks save are not worth their merges. In float32
squares of 4,096 still gain; in bfloat16 their backward loses. See benchmarks/kernels.py."""

Blocks = Callable[[Tensor, int], Tensor]


def block_rows(rows: int, keys: int, dtype: torch.dtype, backward: bool = False) -> int:
    """The rows of a block on a causal tile's diagonal; all of them where halving is no gain."""
    block = rows
    while block > BLOCK and block % 2 == 0:
        block //= 2
    most = _most_rows(dtype, backward)
    return block if rows == keys <= most and block <= BLOCK else rows


def _most_rows(dtype: torch.dtype, backward: bool) -> int:
    """The rows of a causal square beyond which halving is no gain."""
    if dtype == torch.bfloat16 and backward and multiplies_bfloat16():
        return 0  # there products of 256 rows gain less than they lose beside long ones
    return MOST_ROWS.get(dtype, USUALLY)


def multiplies_bfloat16() -> bool:
    """Whether torch has this CPU multiply bfloat16 as it is, and does not widen it first."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def halved_forward(
    run: Forward, q: Tensor, k: Tensor, v: Tensor, scale: float, block: int
) -> tuple[Tensor, Tensor]:
    """Kernel.forward of a causal tile of n rows and keys, n a power of two times `block`.

    Returns:
        out (b, n, h, d) and lse (b, h, n), float32 or float64.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    part, part_lse = run(_blocks(q, block), _blocks(k, block), _blocks(v, block), scale, CAUSAL)
    out = _whole(part, q.shape, dtype)
    lse = _whole(part_lse.transpose(1, 2), q.shape[:-1], dtype)
    for rows in _sizes(block, q.shape[1]):
        earlier = _earlier(k, rows), _earlier(v, rows)
        part, part_lse = run(_later(q, rows), *earlier, scale, FULL)
        merge_(_later(out, rows), _later(lse, rows), part, part_lse.transpose(1, 2))
    return out, lse.transpose(1, 2)


def halved_backward(run: Backward, tile: TileGrad, scale: float, block: int) -> Grads:
    """Kernel.backward of the same tile.

    Returns:
        dq (b, n, h, d), dk and dv (b, n, g, d), float32 or float64.
    """

    dout, q, k, v, out, *stats = tile

    def call(queries: Blocks, keys: Blocks, rows: int, band: Band) -> Grads:
        grad, own, found = (queries(x, rows) for x in (dout, q, out))
        lse, delta = (queries(x.transpose(1, 2), rows).transpose(1, 2) for x in stats)
        own_tile = TileGrad(grad, own, keys(k, rows), keys(v, rows), found, lse, delta)
        return run(own_tile, scale, band)

    dtype = torch.promote_types(q.dtype, torch.float32)
    parts = zip(call(_blocks, _blocks, block, CAUSAL), (q, k, v), strict=True)
    dq, dk, dv = (_whole(part, like.shape, dtype) for part, like in parts)
    for rows in _sizes(block, q.shape[1]):
        totals = _later(dq, rows), _earlier(dk, rows), _earlier(dv, rows)
        for total, part in zip(totals, call(_later, _earlier, rows, FULL), strict=True):
            total += part
    return dq, dk, dv


def _sizes(block: int, rows: int) -> Iterator[int]:
    """Rows of the squares between blocks: as many as a block, twice as many, ... half of all."""
    while block < rows:
        yield block
        block *= 2


def _whole(blocks: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """What `_blocks` cut, in one tensor that the other cuts are views of."""
    return blocks.to(dtype).reshape(shape).contiguous()


def _blocks(x: Tensor, rows: int) -> Tensor:
    """(b, n, ...) as (b * n / rows, rows, ...)."""
    return x.reshape(-1, rows, *x.shape[2:])


def _earlier(x: Tensor, rows: int) -> Tensor:
    """Every other block of so many rows, from the first on."""
    return _blocks(x, 2 * rows)[:, :rows]


def _later(x: Tensor, rows: int) -> Tensor:
    """Every other block of so many rows, from the second on."""
    return _blocks(x, 2 * rows)[:, rows:]
