"""Masks in slices through SequenceParallel: exact, only rows that are read are sent, refusals."""

from __future__ import annotations

import pytest
import torch

from tests.dense import dense_attention
from tests.helpers import run_threads
from tests.sequences import SEQLEN, run_attend, tensors
from tests.slices import SLICES, sliced
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.schedule.mask import make_mask

CONFIGS = (
    {"ulysses_degree": 4, "route": "ring"},
    {"ulysses_degree": 2, "route": {"name": "mesh", "rows": 2, "cols": 1}, "ulysses_stride": 2},
    {"ulysses_degree": 2, "route": "all_gather", "ulysses_chunks": 2, "backward_moves": "queries"},
    {"route": {"name": "concentric", "team_size": 2}, "layout": "contiguous"},
    {"strategy": "lss"},
    {"route": "ring", "layout": "balanced"},
    {
        "route": {"name": "double_ring", "inner": 2},
        "layout": "balanced",
        "backward_moves": "queries",
    },
    {"ulysses_degree": 2, "route": "ring", "layout": "balanced"},
    {"layout": "balanced"},
)


@pytest.mark.parametrize("name", SLICES)
@pytest.mark.parametrize("config", range(len(CONFIGS)))
def test_slices_are_exact_in_every_configuration(name, config):
    """Slices of 37 tokens in a sequence of 45: the last 8 are in no slice, their output is 0."""
    options = {"sequence_parallel_size": 4, **CONFIGS[config]}
    assert run_attend(options, 8, 4, SLICES[name])[0] < 1e-10


def on_a_ring(comm, **options):
    """SequenceParallel on all ranks, route "ring" unless the options name another."""
    config = {"sequence_parallel_size": comm.size, "route": "ring"} | options
    return SequenceParallel(SequenceParallelConfig.from_dict(config), comm)


def bytes_sent(comm, mask):
    """By label, in a forward and a backward of 64 tokens."""
    sp = on_a_ring(comm)
    q, k, v, _ = (sp.shard(x).requires_grad_() for x in tensors(4, 4, seqlen=64))
    sp.report()
    sp.attention(q, k, v, **mask).sum().backward()
    return sp.report()


def test_only_rows_that_are_read_are_sent():
    """In zigzag rank 0 owns tokens 0-8 and 56-64, rank 1 owns 8-16 and 48-56.

    Queries 8-12 and 60-64 read keys 0-2: rank 0 sends two keys to rank 1, which sends their
    gradients back.
    """
    reports = run_threads(4, bytes_sent, sliced((8, 12, 0, 2, "full"), (60, 64, 0, 2, "causal")))
    key = 2 * 2 * 4 * 8 * 8  # bytes of k and v of a row: batch 2, 4 heads of 8, float64
    assert reports[0] == {"forward step 0": 2 * key, "backward step 0": 2 * key}
    assert sum(reports[1].values()) == 2 * key and len(reports[1]) == 1
    assert reports[2] == reports[3] == {}


def test_cross_attention_with_slices_is_exact():
    """45 queries, 30 keys."""
    mask = sliced((0, 20, 5, 30, "full"), (20, 45, 0, 11, "causal"))
    q, k, v = tensors(4, 4)[0], *tensors(4, 4, seqlen=30)[1:3]
    expected = dense_attention(q, k, v, make_mask(**mask), 8**-0.5)

    def rank(comm):
        sp = on_a_ring(comm)
        return sp.unshard(sp.attention(sp.shard(q), sp.shard(k), sp.shard(v), **mask))

    for out in run_threads(4, rank):
        assert (out - expected).abs().max() < 1e-10


@pytest.mark.parametrize(
    ("masks", "message"),
    (
        (
            (sliced((0, 9, 2, 11, "causal")), sliced((0, 9, 2, 11, "bicausal"))),
            r"mask: slices: queries \(0, 9\) of keys \(2, 11\), band\(left=inf, right=2\) "
            r"\(ranks \[0\]\), slices: .*band\(left=-2, right=2\) \(ranks \[1\]\)",
        ),
        ((SLICES["few_rows"], {"causal": True}), r"mask: slices: .*full \(ranks \[0\]\), causal"),
        (2 * (sliced((0, 46, 0, 9, "full")),), r"q_ranges: slice 0 ends beyond .* 45 tokens"),
        (2 * (sliced((0, 4, 0, 9, "full"), (4, 9, 9, 99, "causal")),), r"k_ranges: slice 1 .*99"),
    ),
)
def test_masks_that_differ_or_do_not_fit_are_refused_on_all_ranks(masks, message):
    def rank(comm):
        sp = on_a_ring(comm)
        q, k, v, _ = (sp.shard(x) for x in tensors(4, 4))
        with pytest.raises(ValueError, match=message):
            sp.attention(q, k, v, **masks[comm.rank])
        return "refused"

    assert run_threads(2, rank) == ["refused", "refused"]


@pytest.mark.parametrize("sink", (None, 0.0, -torch.inf))
def test_rows_in_no_slice_give_zero_and_get_no_gradient(sink):
    sinks = None if sink is None else torch.full((4,), sink, dtype=torch.float64)

    def rank(comm):
        sp = on_a_ring(comm)
        q, k, v, _ = (sp.shard(x).requires_grad_() for x in tensors(4, 4))
        out = sp.attention(q, k, v, **sliced((0, 5, 0, 5, "causal")), sinks=sinks)
        out.square().sum().backward()
        in_no_slice = sp.positions(SEQLEN) >= 5
        return [x[:, in_no_slice] for x in (out.detach(), q.grad, k.grad)]

    for rows in run_threads(3, rank):
        assert all(torch.equal(x, torch.zeros_like(x)) for x in rows)


@pytest.mark.parametrize("layout", ("balanced", "zigzag"))
def test_shard_batch_shards_by_the_layout_of_the_slices(layout):
    """Rows of every tensor are those of `positions`; the last of 37 tokens has no label.

    Zigzag pads to 40 tokens. Padding is in no slice, and has the position of the last token.
    """
    mask, ids = SLICES["prefix_lm"], torch.arange(2 * 37).view(2, 37)

    def rank(comm):
        sp = on_a_ring(comm, layout=layout)
        batch = sp.shard_batch({"input_ids": ids, "labels": ids, **mask})
        rows = sp.positions(37 if layout == "balanced" else 40, **mask)
        assert {key: batch[key] for key in mask} == mask and "cu_seqlens" not in batch
        assert torch.equal(batch["position_ids"][0], rows.clamp(max=36))
        labelled = rows < 36
        assert torch.equal(batch["labels"][0, labelled], ids[0, rows[labelled] + 1])
        assert (batch["labels"][:, ~labelled] == -100).all()
        return sp.unshard(batch["input_ids"], 1, **mask)

    for gathered in run_threads(4, rank):
        assert torch.equal(gathered[:, :37], ids)


X = torch.zeros(1, 37, 2, 8)
BALANCED_NEEDS_SLICES = "balanced layout follows from the slices"


@pytest.mark.parametrize(
    ("call", "message"),
    (
        (lambda sp: sp.shard(X), BALANCED_NEEDS_SLICES),
        (lambda sp: sp.positions(37), BALANCED_NEEDS_SLICES),
        (lambda sp: sp.unshard(X), BALANCED_NEEDS_SLICES),
        (lambda sp: sp.attention(X, X, X, causal=True), BALANCED_NEEDS_SLICES),
        (
            lambda sp: sp.attention(X, X[:, :30], X[:, :30], **sliced((0, 37, 0, 30, "full"))),
            "take another layout for cross attention",
        ),
        (
            lambda sp: sp.shard(X, 1, (0, 37), **SLICES["bicausal"]),
            r"leave \['cu_seqlens'\] out",
        ),
        (
            lambda sp: sp.attention(*3 * [X[:, : 18 + 2 * sp.rank]], **SLICES["bicausal"]),
            r"shards of the balanced layout: .*got \[18, 20\]",
        ),
    ),
    ids=(
        "shard",
        "positions",
        "unshard",
        "attention without slices",
        "cross attention",
        "slices and cu_seqlens",
        "other shards",
    ),
)
def test_calls_that_the_balanced_layout_cannot_serve_are_refused(call, message):
    def rank(comm):
        sp = on_a_ring(comm, layout="balanced")
        with pytest.raises(ValueError, match=message):
            call(sp)

    run_threads(2, rank)


def test_a_slice_that_contains_padding_is_refused():
    """36 valid tokens of 40; the slices have 37."""

    def rank(comm):
        ids = torch.zeros(2, 40, dtype=torch.long)
        valid = (torch.arange(40) < 36).long().expand(2, -1)
        batch = {"input_ids": ids, "attention_mask": valid, **SLICES["prefix_lm"]}
        with pytest.raises(ValueError, match="slice 1 ends beyond the sequence of 36 tokens"):
            on_a_ring(comm).shard_batch(batch)

    run_threads(2, rank)


@pytest.mark.parametrize("options", ({"ulysses_degree": 2}, {"layout": "balanced"}), ids=str)
@pytest.mark.parametrize("name", ("prefix_lm", "window_with_sinks", "few_rows"))
def test_sinks_softcap_and_alibi_on_slices_are_exact(name, options):
    """A row without a key has its sink alone: its output is 0."""
    mask = SLICES[name]
    q, k, v, dout = tensors(4, 2)
    sinks = torch.linspace(-1, 1, 4).double()
    scores = {"softcap": 5.0, "alibi_slopes": torch.tensor([0.5, 0.2, 0.1, 0.0]).double()}

    def rank(comm):
        sp = on_a_ring(comm, **options)
        local = [sp.shard(x, **mask).requires_grad_() for x in (q, k, v)]
        rank_sinks = sinks.clone().requires_grad_()
        out = sp.attention(*local, sinks=rank_sinks, **scores, **mask)
        out.backward(sp.shard(dout, **mask))
        gathered = [sp.unshard(x, **mask) for x in (out.detach(), *(x.grad for x in local))]
        return [*gathered, sp.sum_over_ranks(rank_sinks.grad)]

    inputs = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
    dense = dense_attention(*inputs[:3], make_mask(**mask), 8**-0.5, sinks=inputs[3], **scores)
    expected = [dense.detach(), *torch.autograd.grad(dense, inputs, dout)]
    for result in run_threads(4, rank):
        for actual, reference in zip(result, expected, strict=True):
            assert (actual - reference).abs().max() < 1e-10


@pytest.mark.parametrize("layout", ("balanced", "zigzag"))
def test_dropout_on_slices_does_not_depend_on_the_number_of_ranks(layout):
    mask = SLICES["shared_question"]

    def rank(comm):
        sp = on_a_ring(comm, layout=layout)
        local = [sp.shard(x, **mask) for x in tensors(4, 2)[:3]]
        return sp.unshard(sp.attention(*local, dropout_p=0.3, dropout_seed=7, **mask), **mask)

    (one_rank,), four_ranks = run_threads(1, rank), run_threads(4, rank)
    assert (one_rank - four_ranks[0]).abs().max() < 1e-10
