"""Bytes of one row of queries and of keys: in messages, and in memory."""

from __future__ import annotations

from dataclasses import dataclass

PARTIALS = (FLOAT32, ACTIVATION) = ("float32", "activation")
"""The dtypes in which partial results may travel: that of sums, or that of activations."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of q, k and v. `itemsize`, `accumulator_size`: bytes of an input, and of a sum."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    accumulator_size: int = 4
    value_dim: int | None = None
    """head_dim of the values; None = that of queries and keys."""
    partial_size: int | None = None
    """Bytes of an element of partial out or gradients in a message; None = accumulator_size."""
    latent: int = 0
    """Elements of a token's latent, sent instead of its keys and values; 0 = no latents."""

    @property
    def partial(self) -> int:
        """Bytes of an element of partial out or gradients in a message."""
        return self.partial_size or self.accumulator_size

    @property
    def value(self) -> int:
        """Elements of one value, or of one head's output."""
        return self.value_dim or self.head_dim

    @property
    def key_row(self) -> int:
        """Elements of one row of keys and values."""
        width = self.latent or self.head_dim + self.value
        return self.batch * self.kv_heads * width


@dataclass(frozen=True, slots=True)
class SideBytes:
    """Bytes of one row of a side."""

    row: int
    """Inputs, as they are sent to readers."""
    partial: int = 0
    """Partial results, as they are sent to the owner; 0 = this side has no results."""
    summed: int = 0
    """Partial results, as they are summed in memory."""
    kept: int = 0
    """The part of `row` that is in the buffer since the forward, and so is not gathered again."""
    output: int = 0
    """A buffer in place of the output of other owners' queries (runtime/surrogate_out.py)."""

    @property
    def gathered(self) -> int:
        return self.row - self.kept


@dataclass(frozen=True, slots=True)
class RowBytes:
    """Bytes of one row of the side that stays, and of the side that walks."""

    stay: SideBytes
    walk: SideBytes


def forward_row_bytes(shape: Shape, queries_walk: bool = False) -> RowBytes:
    """Forward: queries have inputs q and results (out, lse); keys have inputs [K|V] only."""
    heads = shape.batch * shape.heads
    queries = SideBytes(
        row=heads * shape.head_dim * shape.itemsize,
        partial=heads * (shape.value * shape.partial + shape.accumulator_size),
        summed=heads * (shape.value + 1) * shape.accumulator_size,
    )
    keys = SideBytes(shape.key_row * shape.itemsize)
    return RowBytes(keys, queries) if queries_walk else RowBytes(queries, keys)


def backward_row_bytes(shape: Shape, queries_walk: bool = False, keep: bool = False) -> RowBytes:
    """Backward: inputs (q, dout, lse, delta) and [K|V], results dq and [dK|dV].

    Args:
        keep: the forward kept q and [K|V] where it gathered them.
    """
    heads = shape.batch * shape.heads
    q, output = (heads * width * shape.itemsize for width in (shape.head_dim, shape.value))
    queries = SideBytes(
        row=q + output + 2 * heads * shape.accumulator_size,
        partial=heads * shape.head_dim * shape.partial,
        summed=heads * shape.head_dim * shape.accumulator_size,
        kept=q if keep else 0,
        output=output,
    )
    row = shape.key_row * shape.itemsize
    keys = SideBytes(
        row=row,
        partial=shape.key_row * shape.partial,
        summed=shape.key_row * shape.accumulator_size,
        kept=row if keep else 0,
    )
    return RowBytes(keys, queries) if queries_walk else RowBytes(queries, keys)
