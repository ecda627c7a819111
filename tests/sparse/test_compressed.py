"""Attention to a window and to entries of groups: exact beside dense attention with a mask."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import run_threads
from tests.sparse.test_attention import gradients, roundings, sequence_parallel
from wf_backends.sparse import CompressedAttention, readers
from wf_backends.sparse.compressed import Entries, Groups
from wf_backends.sparse.needed_rows import with_earlier_rows

SEQLEN, BATCH, HEADS, DIM = 29, 2, 3, 4
WHOLE = (0, SEQLEN)
DOCUMENTS = (0, 9, 10, 12, SEQLEN)


def pool(offsets: Tensor, groups: Groups) -> Tensor:
    """A weighted mean, which knows which rows are there, and the offset of a group's last row."""
    weights = torch.arange(1.0, 1 + groups.rows.shape[2], dtype=torch.float64)
    weights = torch.where(groups.is_there, weights + offsets[groups.last, None] / SEQLEN, 0.0)
    return (groups.rows * weights.unsqueeze(-1)).mean(2)


def mean(groups: Groups) -> Tensor:
    return groups.rows.mean(2)


def dense_entries(x: Tensor, ratio: int, reach: int, start: int, stop: int) -> Tensor:
    """The entries of one document."""
    padded = torch.cat((x.new_zeros(BATCH, reach, x.shape[2]), x[:, start:stop]), 1)
    found = [x.new_empty(BATCH, 0, x.shape[2])]
    for number in range((stop - start) // ratio):
        end = (number + 1) * ratio
        is_there = (torch.arange(end - reach, end) >= 0)[None]
        rows = padded[:, None, end : end + reach]
        found.append(pool(torch.tensor([end - 1]), Groups(rows, is_there, torch.tensor([0]))))
    return torch.cat(found, 1)


def dense(
    q: Tensor,
    kv: Tensor,
    x: Tensor,
    sinks: Tensor,
    ratio: int,
    reach: int,
    window: int,
    borders: Any,
) -> Tensor:
    outs = list[Tensor]()
    for start, stop in pairwise(borders):
        entries = dense_entries(x, ratio, reach, start, stop)
        keys = torch.cat((kv[:, start:stop], entries), 1)
        row = torch.arange(stop - start)[:, None]
        token, entry = torch.arange(stop - start), torch.arange(entries.shape[1])
        in_window = (token <= row) & (token > row - window)
        seen = torch.cat((in_window, (entry + 1) * ratio <= row + 1), 1)
        scores = torch.einsum("bihd,bjd->bhij", q[:, start:stop], keys) * DIM**-0.5
        scores = scores.masked_fill(~seen, -torch.inf)
        of_sinks = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        p = torch.cat((scores, of_sinks), -1).softmax(-1)[..., :-1]
        outs.append(torch.einsum("bhij,bjd->bihd", p, keys))
    return torch.cat(outs, 1)


def all_seen(entries: Entries) -> Tensor:
    columns = torch.arange(int(entries.count.max()))
    seen = columns < entries.count[:, None]
    return torch.where(seen, entries.first[:, None] + columns, -1).expand(BATCH, -1, -1)


@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("borders", [WHOLE, DOCUMENTS], ids=["whole", "documents"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "document_zigzag"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("ratio", "reach", "window"), [(2, 4, 3), (4, 4, 1), (5, 9, 40), (14, 14, 7)]
)
def test_outputs_and_gradients_are_those_of_dense_attention(
    ratio: int,
    reach: int,
    window: int,
    size: int,
    layout: str,
    borders: tuple[int, ...],
    chosen: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`chosen`: whether the entries that a row sees are given one by one, or all of them meant."""
    monkeypatch.setattr(readers, "BLOCK_ROWS", 4)  # blocks of 1 to 4 rows
    monkeypatch.setattr(readers, "BLOCK_SCORES", 40 * BATCH * HEADS)
    generator = torch.Generator().manual_seed(0)
    shapes = (BATCH, SEQLEN, HEADS, DIM), (BATCH, SEQLEN, DIM), (BATCH, SEQLEN, DIM), (HEADS,)
    drawn = [torch.randn(*x, dtype=torch.float64, generator=generator) for x in shapes]
    leaves = [x.clone().requires_grad_() for x in drawn]
    out = dense(*leaves, ratio, reach, window, borders)
    expected = gradients(out, *leaves)

    def rank(comm: Any) -> list[Tensor]:
        sp = sequence_parallel(comm, layout)
        whole = [x.clone().requires_grad_() for x in drawn]
        q, kv, x = (sp.shard(y, cu_seqlens=borders) for y in whole[:3])
        attention = CompressedAttention(sp)
        offsets = torch.cat([torch.arange(b - a) for a, b in pairwise(borders)])
        offsets = sp.shard(offsets, 0, cu_seqlens=borders)
        entries = attention.compress(x, ratio, partial(pool, offsets), reach, borders)
        choice = all_seen(entries) if chosen else None
        options = {"ratio": ratio, "sinks": whole[3], "cu_seqlens": borders}
        out = attention(q, kv, entries.values, choice, window, **options)
        results = gradients(sp.unshard(out, cu_seqlens=borders), *whole)
        return [*results[:-1], sp.sum_over_ranks(results[-1])]

    for got in run_threads(size, rank):
        torch.testing.assert_close(got, [*expected], rtol=0, atol=1e-12)


@pytest.mark.parametrize("chosen", [True, False])
def test_an_empty_batch_has_empty_outputs_and_gradients(chosen: bool) -> None:
    def rank(comm: Any) -> list[tuple[int, ...]]:
        q = torch.zeros(0, 8, HEADS, DIM, requires_grad=True)
        kv = torch.zeros(0, 8, DIM, requires_grad=True)
        attention = CompressedAttention(sequence_parallel(comm))
        entries = attention.compress(kv, 4, mean).values
        choice = torch.zeros(0, 8, 1, dtype=torch.long) if chosen else None
        out = attention(q, kv, entries, choice, window=3, ratio=4)
        return [tuple(x.shape) for x in gradients(out, q, kv)]

    q_shape, kv_shape = (0, 8, HEADS, DIM), (0, 8, DIM)
    assert run_threads(2, rank) == [[q_shape, q_shape, kv_shape]] * 2


@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_in_half_precision_are_rounded_once(dtype: torch.dtype, chosen: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (BATCH, SEQLEN, HEADS, DIM), (BATCH, SEQLEN, DIM), (BATCH, 7, DIM)
    q, kv, entries = (torch.randn(x, dtype=torch.float64, generator=generator) for x in shapes)

    def rank(comm: Any) -> list[float]:
        sp = sequence_parallel(comm)
        count = (sp.positions(SEQLEN) + 1) // 4
        choice = all_seen(Entries(entries, torch.zeros_like(count), count)) if chosen else None

        def attend(q: Tensor, kv: Tensor, entries: Tensor, sinks: Tensor) -> Tensor:
            return CompressedAttention(sp)(q, kv, entries, choice, 3, 4, sinks=sinks)

        return roundings(dtype, attend, *map(sp.shard, (q, kv)), entries, torch.ones(HEADS))

    for out, dq, dkv, dentries, dsinks in run_threads(2, rank):
        assert max(out, dq, dentries, dsinks) < 1.1
        assert dkv < 1.2  # messages between ranks are in half precision


def refusal(
    chosen: int | None = 0, ratio: int = 4, window: int = 3, dtype: Any = torch.float64
) -> str:
    """The error on each of two ranks, the same for both but for their own values."""
    x = torch.zeros(1, 8, 4, dtype=torch.float64)

    def rank(comm: Any) -> str:
        attention = CompressedAttention(sequence_parallel(comm))
        with pytest.raises(ValueError) as error:
            entries = attention.compress(x, ratio, mean).values.to(dtype)
            choice = None if chosen is None else torch.full((1, 8, 1), chosen)
            attention(x.unsqueeze(2), x, entries, choice, window + comm.rank * (window > 90))
        return str(error.value)

    return " | ".join(run_threads(2, rank))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ratio": 0}, "ratio"),
        ({"chosen": None}, "ratio must be"),
        ({"window": 0}, "window"),
        ({"chosen": 4}, "chosen must be of 4 entries, or -1, got 4"),
        ({"dtype": torch.float32}, "entries must have q's dtype, torch.float64, got torch.float32"),
        ({"window": 91}, "window: 91 (ranks [0]), 92 (ranks [1])"),
    ],
)
def test_bad_arguments_are_refused_on_every_rank(changes: Any, message: str) -> None:
    assert refusal(**changes).count(message) >= 2


X = torch.zeros(1, 8, 4, dtype=torch.float64)
NO_CHOICE = torch.full((1, 8, 1), -1)
WRONG_ON_ONE_RANK: dict[str, Any] = {
    "borders": lambda a: a.compress(X, 4, mean, cu_seqlens=(1, 16)),
    "dims": lambda a: a.compress(X[0], 4, mean),
    "borders of a call": lambda a: a(X[:, :, None], X, X, NO_CHOICE, 2, cu_seqlens=(1, 16)),
    "rows of kv": lambda a: a(X[:, :, None], X[:, :4], X, NO_CHOICE, 2),
}


@pytest.mark.parametrize("wrong", WRONG_ON_ONE_RANK)
def test_wrong_arguments_of_one_rank_are_refused_on_all(wrong: str) -> None:
    def rank(comm: Any) -> None:
        attention = CompressedAttention(sequence_parallel(comm))
        with pytest.raises(ValueError, match="must be" if comm.rank else "do not agree"):
            if comm.rank:
                WRONG_ON_ONE_RANK[wrong](attention)
            attention.compress(X, 4, mean)

    run_threads(2, rank)


def test_a_pool_that_makes_no_entry_of_each_group_is_refused() -> None:
    """It would have given the first of its rows, without an error."""

    def rank(comm: Any) -> None:
        attention = CompressedAttention(sequence_parallel(comm))
        with pytest.raises(ValueError, match=r"pool must return \(b, n, d\), got \(1, 4, 4\)"):
            attention.compress(X, 4, lambda groups: groups.rows.mean(1))

    run_threads(2, rank)


def test_entries_of_another_shape_are_refused() -> None:
    def rank(comm: Any) -> None:
        attention = CompressedAttention(sequence_parallel(comm))
        message = r"entries must be \(b, T, d\) for q \(1, 8, 1, 4\), got \(1, 2, 3\)"
        with pytest.raises(ValueError, match=message):
            attention(X.unsqueeze(2), X, X[:, :2, :3], NO_CHOICE, 2)

    run_threads(2, rank)


def test_only_rows_of_the_same_document_are_needed() -> None:
    layout = ((0, 3), (9, 12)), ((3, 9),)
    assert with_earlier_rows(layout, 2, (0, 2, 12)) == (((0, 3), (7, 12)), ((2, 9),))


def test_all_entries_of_another_ratio_are_refused_on_every_rank() -> None:
    def rank(comm: Any) -> None:
        attention = CompressedAttention(sequence_parallel(comm))
        entries = attention.compress(X, 4, mean).values
        with pytest.raises(ValueError, match="of ratio=8 tokens, 2 in this sequence, got 4"):
            attention(X.unsqueeze(2), X, entries, None, 2, ratio=8)

    run_threads(2, rank)
