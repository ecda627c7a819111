"""How many bytes a rank sends, by message label, derived from its program.

Pure: standard library only. The labels are the executor's, so that what is derived and what a
communicator counted can be compared one by one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from wf_backends.lowering.program import Parcel, RankProgram

PARTIALS = (FLOAT32, ACTIVATION) = ("float32", "activation")
"""In which dtype partial results may travel: that of the sums, or that of the activations."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the tensors at hand. `itemsize`, `accumulator_size`: bytes of one element."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    accumulator_size: int = 4
    value_dim: int | None = None
    """head_dim of the values; None = that of queries and keys."""
    partial_size: int | None = None
    """Bytes of one element of partial results (of out and gradients, not of lse) that travel; None
    = accumulator_size."""

    latent: int = 0
    """Numbers of a token that travel in place of its keys and values; 0 = keys and values."""

    @property
    def partial(self) -> int:
        """Bytes of one element of a partial result that travels."""
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
    """What travels to its readers."""
    partial: int = 0
    """Its partial results as they travel; 0 = nothing goes back to the owner."""
    summed: int = 0
    """Its partial results as they are summed in memory."""
    kept: int = 0
    """The part of `row` that the forward left in the buffer: it is not gathered."""
    output: int = 0
    """What stands in for the output of queries that are not at home; it never travels."""

    @property
    def gathered(self) -> int:
        return self.row - self.kept


@dataclass(frozen=True, slots=True)
class RowBytes:
    """Bytes of one row of the side that stays, and of the side that walks."""

    stay: SideBytes
    walk: SideBytes


def forward_row_bytes(shape: Shape, queries_walk: bool = False) -> RowBytes:
    """Forward: queries are (q) and (out, lse), keys are [K|V] and nothing goes home."""
    heads = shape.batch * shape.heads
    queries = SideBytes(
        row=heads * shape.head_dim * shape.itemsize,
        partial=heads * (shape.value * shape.partial + shape.accumulator_size),
        summed=heads * (shape.value + 1) * shape.accumulator_size,
    )
    keys = SideBytes(shape.key_row * shape.itemsize)
    return RowBytes(keys, queries) if queries_walk else RowBytes(queries, keys)


def backward_row_bytes(shape: Shape, queries_walk: bool = False, keep: bool = False) -> RowBytes:
    """Backward: queries are (q, dout, lse, delta) and dq, keys are [K|V] and [dK|dV].

    Args:
        keep: q and [K|V], where the forward gathered them, are still there.
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


def bytes_sent(program: RankProgram, rows: RowBytes, name: str) -> dict[str, int]:
    """Bytes that the program's rank sends in the pass called `name`, by message label."""

    def count(parcels: Iterable[Parcel]) -> int:
        return sum(p.num_rows for p in parcels if p.peer != program.rank)

    rounds = [one for step in program.steps for one in step.rounds]
    fetched = (parcel for one in rounds for parcel in (*one.fetch.send, *one.pass_on.send))
    returned = (parcel for one in rounds for parcel in (*one.pass_back.send, *one.home.send))
    gathered = count(program.walk.send) * rows.walk.gathered + count(fetched) * rows.stay.gathered
    sent, leaving = {f"{name} gather": gathered}, 0
    for index, step in enumerate(program.steps):
        hop = count((*step.hop_out, *step.owner_out)) * rows.walk.row
        sent[f"{name} step {index}"] = hop + leaving
        leaving = count((*step.partial_out, *step.home_out)) * rows.walk.partial
    sent[f"{name} home"] = count(returned) * rows.stay.partial + leaving
    return {label: num_bytes for label, num_bytes in sent.items() if num_bytes}
