"""Masks in slices through SequenceParallel: exact, needed rows alone travel, ranks agree."""

from __future__ import annotations

import pytest
import torch

from tests.dense import dense_attention
from tests.helpers import run_threads
from tests.sequences import SEQLEN, run_attend, tensors
from tests.slices import SLICES, sliced
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.schedule.mask import make_mask

SPLITS = (
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
@pytest.mark.parametrize("split", range(len(SPLITS)))
def test_slices_are_exact_with_every_head_split(name, split):
    """The last 8 tokens stand in no slice: their output is 0."""
    assert run_attend({"sequence_parallel_size": 4, **SPLITS[split]}, 8, 4, SLICES[name])[0] < 1e-10


def sent(comm, mask):
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=4, route="ring"), comm)
    q, k, v, _ = (sp.shard(x).requires_grad_() for x in tensors(4, 4, seqlen=64))
    sp.report()
    sp.attention(q, k, v, **mask).sum().backward()
    return sp.report()


def test_rows_that_nobody_reads_do_not_travel():
    """Zigzag: rank 0 owns 0-8 and 56-64. Only keys 0-2 are read, by rows of ranks 0 and 1."""
    reports = run_threads(4, sent, sliced((8, 12, 0, 2, "full"), (60, 64, 0, 2, "causal")))
    key = 2 * 2 * 4 * 8 * 8  # bytes of k and v of a row: batch 2, 4 heads of 8, float64
    assert reports[0] == {"forward step 0": 2 * key, "backward step 0": 2 * key}
    assert sum(reports[1].values()) == 2 * key and len(reports[1]) == 1  # their gradients
    assert reports[2] == reports[3] == {}


def test_cross_attention_with_slices():
    told = sliced((0, 20, 5, 30, "full"), (20, 45, 0, 11, "causal"))

    def rank(comm):
        sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=4, route="ring"), comm)
        parts = (sp.shard(x) for x in whole)
        return sp.unshard(sp.attention(*parts, **told))

    whole = tensors(4, 4)[0], *tensors(4, 4, seqlen=30)[1:3]
    want = dense_attention(*whole, make_mask(**told), 8**-0.5)
    for out in run_threads(4, rank):
        assert (out - want).abs().max() < 1e-10


def attend_each(comm, masks):
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=2, route="ring"), comm)
    q, k, v, _ = (sp.shard(x) for x in tensors(4, 4))
    sp.attention(q, k, v, **masks[comm.rank])


@pytest.mark.parametrize(
    ("masks", "says"),
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
def test_masks_that_differ_or_do_not_fit_are_refused_on_all_ranks(masks, says):
    told = []

    def rank(comm):
        with pytest.raises(ValueError, match=says) as error:
            attend_each(comm, masks)
        told.append(str(error.value))

    run_threads(2, rank)
    assert len(told) == 2


def test_rows_without_a_slice_give_zero_and_take_no_gradient():
    def rank(comm):
        sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=3, route="ring"), comm)
        q, k, v, _ = (sp.shard(x).requires_grad_() for x in tensors(4, 4))
        out = sp.attention(q, k, v, **sliced((0, 5, 0, 5, "causal")))
        out.square().sum().backward()
        rows = sp.positions(SEQLEN)
        return out.detach()[:, rows >= 5], q.grad[:, rows >= 5], k.grad[:, rows >= 5]

    for found in run_threads(3, rank):
        assert all(torch.equal(x, torch.zeros_like(x)) for x in found)


@pytest.mark.parametrize("layout", ("balanced", "zigzag"))
def test_a_batch_is_cut_where_its_slices_say(layout):
    """Rows of every tensor as `positions` numbers them; padding stands in no slice."""
    told, ids = SLICES["prefix_lm"], torch.arange(2 * 37).view(2, 37)

    def rank(comm):
        words = {"sequence_parallel_size": 4, "route": "ring", "layout": layout}
        sp = SequenceParallel(SequenceParallelConfig.from_dict(words), comm)
        local = sp.shard_batch({"input_ids": ids, "labels": ids, **told})
        seqlen = 37 if layout == "balanced" else 40
        rows = sp.positions(seqlen, **told)
        assert {key: local[key] for key in told} == told and "cu_seqlens" not in local
        assert torch.equal(local["position_ids"][0], rows)
        inside = rows[rows < 36]
        assert torch.equal(local["labels"][0, rows < 36], ids[0, inside + 1])
        assert (local["labels"][:, rows >= 36] == -100).all()
        return sp.unshard(local["input_ids"], 1, **told)

    for whole in run_threads(4, rank):
        assert torch.equal(whole[:, :37], ids)


def test_what_the_balanced_layout_needs_is_said():
    x = torch.zeros(1, 37, 2, 8)

    def rank(comm):
        words = {"sequence_parallel_size": 2, "route": "ring", "layout": "balanced"}
        sp = SequenceParallel(SequenceParallelConfig.from_dict(words), comm)
        for call in (lambda: sp.shard(x), lambda: sp.positions(37), lambda: sp.unshard(x)):
            with pytest.raises(ValueError, match="balanced layout follows from the slices"):
                call()
        with pytest.raises(ValueError, match="balanced layout follows from the slices"):
            sp.attention(x, x, x, causal=True)
        with pytest.raises(ValueError, match="take another layout for cross attention"):
            sp.attention(x, x[:, :30], x[:, :30], **words_across)
        with pytest.raises(ValueError, match=r"leave \['cu_seqlens'\] out"):
            sp.shard(x, 1, (0, 37), **SLICES["bicausal"])
        some = x[:, : 18 + 2 * comm.rank]
        with pytest.raises(ValueError, match=r"shards of the balanced layout: .*got \[18, 20\]"):
            sp.attention(some, some, some, **SLICES["bicausal"])

    words_across = sliced((0, 37, 0, 30, "full"))
    run_threads(2, rank)


def test_padding_in_a_slice_is_refused():
    def rank(comm):
        sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=2, route="ring"), comm)
        ids = torch.zeros(2, 40, dtype=torch.long)
        valid = (torch.arange(40) < 36).long().expand(2, -1)
        with pytest.raises(ValueError, match="slice 1 ends beyond the sequence of 36 tokens"):
            sp.shard_batch({"input_ids": ids, "attention_mask": valid, **SLICES["prefix_lm"]})

    run_threads(2, rank)


@pytest.mark.parametrize("split", ({"ulysses_degree": 2}, {"layout": "balanced"}), ids=str)
@pytest.mark.parametrize("name", ("prefix_lm", "window_with_sinks", "few_rows"))
def test_options_of_attention_on_slices(name, split):
    """Sinks (a row without a key has only its sink, whose value is nothing), caps and slopes."""
    q, k, v, dout = tensors(4, 2)
    sinks, slopes = torch.linspace(-1, 1, 4).double(), torch.tensor([0.5, 0.2, 0.1, 0.0]).double()
    whole = [x.requires_grad_() for x in (q, k, v, sinks)]
    options = {"softcap": 5.0, "alibi_slopes": slopes}
    out = dense_attention(q, k, v, make_mask(**SLICES[name]), 8**-0.5, sinks=sinks, **options)
    wanted = [out.detach(), *torch.autograd.grad(out, whole, dout)]

    def rank(comm):
        words = {"sequence_parallel_size": 4, "route": "ring", **split}
        sp = SequenceParallel(SequenceParallelConfig.from_dict(words), comm)
        mine = [sp.shard(x.detach(), **SLICES[name]).requires_grad_() for x in (q, k, v)]
        own = sinks.detach().clone().requires_grad_()
        out = sp.attention(*mine, sinks=own, **options, **SLICES[name])
        out.backward(sp.shard(dout, **SLICES[name]))
        found = [sp.unshard(x, **SLICES[name]) for x in (out.detach(), *(x.grad for x in mine))]
        return [*found, sp.sum_over_ranks(own.grad)]

    for found in run_threads(4, rank):
        for got, want in zip(found, wanted, strict=True):
            assert (got - want).abs().max() < 1e-10


@pytest.mark.parametrize("layout", ("balanced", "zigzag"))
def test_dropout_on_slices_does_not_depend_on_the_ranks(layout):
    def rank(comm):
        words = {"sequence_parallel_size": comm.size, "route": "ring", "layout": layout}
        sp = SequenceParallel(SequenceParallelConfig.from_dict(words), comm)
        told = SLICES["shared_question"]
        mine = [sp.shard(x, **told) for x in tensors(4, 2)[:3]]
        return sp.unshard(sp.attention(*mine, dropout_p=0.3, dropout_seed=7, **told), **told)

    one, four = run_threads(1, rank)[0], run_threads(4, rank)[0]
    assert (one - four).abs().max() < 1e-10
