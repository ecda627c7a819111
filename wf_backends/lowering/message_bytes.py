"""How many bytes a rank sends, by message label, derived from its program.

Pure: standard library only. The labels are the executor's, so that what is derived and what a
communicator counted can be compared one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
class RowBytes:
    """Bytes of one row of what travels: the sides' tensors, and their partial results."""

    stay: int
    walk: int
    stay_partial: int
    walk_partial: int
    stay_found: int
    """Partial results as they are summed in memory."""
    walk_found: int
    stay_kept: int = 0
    """The part of `stay` that the forward left in the buffer: it is not gathered."""
    walk_kept: int = 0
    stay_output: int = 0
    """What stands in for the output of queries that are not at home; it never travels."""
    walk_output: int = 0

    @property
    def stay_gathered(self) -> int:
        return self.stay - self.stay_kept

    @property
    def walk_gathered(self) -> int:
        return self.walk - self.walk_kept


def forward_row_bytes(shape: Shape, queries_walk: bool = False) -> RowBytes:
    """Forward: queries are (q) and (out, lse), keys are [K|V] and nothing goes home."""
    heads = shape.batch * shape.heads
    queries = heads * shape.head_dim * shape.itemsize
    found = heads * (shape.value + 1) * shape.accumulator_size
    output = heads * (shape.value * shape.partial + shape.accumulator_size)
    keys = shape.key_row * shape.itemsize
    if queries_walk:
        return RowBytes(keys, queries, 0, output, 0, found)
    return RowBytes(queries, keys, output, 0, found, 0)


def backward_row_bytes(shape: Shape, queries_walk: bool = False, keep: bool = False) -> RowBytes:
    """Backward: queries are (q, dout, lse, delta) and dq, keys are [K|V] and [dK|dV].

    Args:
        keep: q and [K|V], where the forward gathered them, are still there.
    """
    heads = shape.batch * shape.heads
    stats = 2 * heads * shape.accumulator_size
    kept_queries, output = (
        heads * width * shape.itemsize for width in (shape.head_dim, shape.value)
    )
    queries = kept_queries + output + stats
    query_grads = _grads(shape, heads * shape.head_dim)
    keys = shape.key_row * shape.itemsize
    key_grads = _grads(shape, shape.key_row)
    kept = (kept_queries, keys) if keep else (0, 0)
    if queries_walk:
        travel, found = zip(key_grads, query_grads, strict=True)
        return RowBytes(keys, queries, *travel, *found, *kept[::-1], walk_output=output)
    travel, found = zip(query_grads, key_grads, strict=True)
    return RowBytes(queries, keys, *travel, *found, *kept, stay_output=output)


def _grads(shape: Shape, elements: int) -> tuple[int, int]:
    """Bytes of so many gradients: as they travel, and as they are summed."""
    return elements * shape.partial, elements * shape.accumulator_size


def bytes_sent(program: RankProgram, rows: RowBytes, name: str) -> dict[str, int]:
    """Bytes that the program's rank sends in the pass called `name`, by message label."""

    def count(parcels: Iterable[Parcel | None]) -> int:
        return sum(p.num_rows for p in parcels if p and p.peer != program.rank)

    rounds = [one for step in program.steps for one in step.rounds]
    fetched = (parcel for one in rounds for parcel in (*one.fetch.send, *one.pass_on.send))
    returned = (parcel for one in rounds for parcel in (*one.pass_back.send, *one.home.send))
    sent = {f"{name} gather": count(program.walk.give) * rows.walk_gathered}
    sent[f"{name} gather"] += count(fetched) * rows.stay_gathered
    leaving = 0
    for index, step in enumerate(program.steps):
        sent[f"{name} step {index}"] = count((*step.forwarded, *step.give)) * rows.walk + leaving
        leaving = count((step.partial_out, *step.home_out)) * rows.walk_partial
    sent[f"{name} home"] = count(returned) * rows.stay_partial + leaving
    return {label: num_bytes for label, num_bytes in sent.items() if num_bytes}


def total(sent: Mapping[str, int]) -> int:
    """All bytes of a report."""
    return sum(sent.values())
