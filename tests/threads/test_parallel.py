"""SequenceParallel as a user holds it: names, shapes, gradients, Ulysses around any route."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.dense import dense_attention
from tests.helpers import run_threads
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.mask import make_mask
from wf_backends.presets import one_host
from wf_backends.topology import from_dict

SEQLEN = 45
ROUTES = {
    1: ["ring"],
    2: ["ring", "all_gather", {"name": "mesh", "rows": 2, "cols": 1}],
    4: ["auto", {"name": "concentric", "team_size": 2}, {"name": "double_ring", "inner": 2}],
}
MASKS = (
    {},
    {"causal": True},
    {"window_size": (5, 2)},
    {"causal": True, "window_size": (9, 9), "cu_seqlens": [0, 7, 30, SEQLEN]},
)


SLOW = {
    "name": "two hosts",
    "hosts": 2,
    "ranks_per_host": 2,
    "nics_per_host": 1,
    "memory_gib": 16,
    "inside": {"latency_us": 20, "gigabits_per_s": 80},
    "between": {"latency_us": 50, "gigabits_per_s": 0.01},
    "kernels": {"sdpa": {"forward_tflops": 0.02, "backward_tflops": 0.04, "call_us": 50}},
}


def bytes_count(gigabits_per_s):
    """As SLOW without latencies, so that even tiny tensors are told apart by their bytes."""
    rates = {"forward_tflops": 0.02, "backward_tflops": 0.04, "call_us": 1e-3}
    inside = {"latency_us": 1e-3, "gigabits_per_s": 80}
    between = {"latency_us": 1e-3, "gigabits_per_s": gigabits_per_s}
    return SLOW | {"inside": inside, "between": between, "kernels": {"sdpa": rates}}


def tensors(heads, kv_heads, dtype=torch.float64, seqlen=SEQLEN):
    random = torch.Generator().manual_seed(0)
    shapes = [(2, seqlen, n, 8) for n in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(s, generator=random, dtype=torch.float64).to(dtype) for s in shapes]


def gradients(out, dout, q, k, v):
    """The output and the gradients of q, k and v."""
    return [out, *torch.autograd.grad((out * dout).sum(), (q, k, v))]


def attend(comm, words, heads, kv_heads, mask, wanted, topology=None):
    """Worst error of what `gradients` gives of whole tensors, through shard and unshard; and what
    was sent: "ulysses", "gather", "step", "home"."""
    sp = SequenceParallel(SequenceParallelConfig.from_dict(words), comm, topology)
    q, k, v, dout = tensors(heads, kv_heads)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = sp.unshard(sp.attention(sp.shard(q), sp.shard(k), sp.shard(v), **mask))
    found = gradients(out, dout, q, k, v)
    worst = max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True))
    return worst, frozenset(label.split()[1] for label in sp.report() if "shard" not in label)


def run_attend(words, heads, kv_heads, mask, topology=None):
    """(worst error of any rank, what each sent), beside dense attention."""
    q, k, v, dout = tensors(heads, kv_heads)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    wanted = gradients(dense_attention(q, k, v, make_mask(**mask), 8**-0.5), dout, q, k, v)
    wanted = [x.detach() for x in wanted]
    size = words["sequence_parallel_size"]
    results = run_threads(size, attend, words, heads, kv_heads, mask, wanted, topology)
    return max(error for error, _ in results), [labels for _, labels in results]


@pytest.mark.parametrize("degree", (1, 2, 4))
@pytest.mark.parametrize("route_size", ROUTES)
@pytest.mark.parametrize("mask", range(len(MASKS)))
def test_ulysses_around_any_route(degree, route_size, mask):
    """Key heads 4 and 2: as many as members, more, and fewer (copies, their gradients summed).

    Of 16 ranks each route meets all three under different masks.
    """
    for number, route in enumerate(ROUTES[route_size]):
        found = (("zigzag", 4), ("contiguous", 2), ("zigzag", 1))
        at = (number + mask) % len(found)
        for layout, kv_heads in found[at : at + 1] if degree * route_size == 16 else found:
            words = {
                "sequence_parallel_size": degree * route_size,
                "ulysses_degree": degree,
                "route": route,
                "layout": layout,
                "kernel": "reference",
            }
            assert run_attend(words, 8, kv_heads, MASKS[mask])[0] < 1e-10, words


@pytest.mark.parametrize(("degree", "stride"), ((2, 2), (2, 4), (4, 2)))
@pytest.mark.parametrize("mask", range(len(MASKS)))
def test_ulysses_among_ranks_that_are_apart(degree, stride, mask):
    """On 8 ranks, blocks of routes, and routes of consecutive ranks; all layouts by turns."""
    for number, route in enumerate(ROUTES[8 // degree]):
        words = {
            "sequence_parallel_size": 8,
            "ulysses_degree": degree,
            "ulysses_stride": stride,
            "route": route,
            "layout": ("zigzag", "contiguous")[(number + mask) % 2],
            "kernel": "reference",
        }
        assert run_attend(words, 8, (4, 2, 1)[number % 3], MASKS[mask])[0] < 1e-10, words


@pytest.mark.parametrize(
    ("degree", "stride", "chunks", "kv_heads"),
    ((2, 1, 2, 8), (2, 1, 4, 8), (2, 4, 2, 4), (4, 2, 2, 8), (8, 1, 1, 8), (1, 1, 1, 2)),
)
@pytest.mark.parametrize("mask", range(len(MASKS)))
def test_heads_traded_in_chunks(degree, stride, chunks, kv_heads, mask):
    """As many key heads as query heads, and groups; what one exchange sends in all is the same."""
    for number, route in enumerate(ROUTES.get(8 // degree, ["ring"])):
        words = {
            "sequence_parallel_size": 8,
            "ulysses_degree": degree,
            "ulysses_stride": stride,
            "route": route,
            "layout": ("zigzag", "contiguous")[(number + mask) % 2],
            "kernel": "reference",
        }
        error, sent = run_attend(words | {"ulysses_chunks": chunks}, 8, kv_heads, MASKS[mask])
        assert error < 1e-10, words
        assert sent == run_attend(words, 8, kv_heads, MASKS[mask])[1]


def sent_in_chunks(comm, words, chunks):
    config = SequenceParallelConfig.from_dict(words | {"ulysses_chunks": chunks})
    sp = SequenceParallel(config, comm)
    q, k, v, dout = (sp.shard(x) for x in tensors(8, 4))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    comm.sent.clear()
    sp.attention(q, k, v, causal=True).backward(dout)
    return dict(comm.sent)


@pytest.mark.parametrize("keep", (False, True))
def test_chunks_send_what_all_heads_at_once_send(keep):
    route = {"name": "concentric", "team_size": 2}
    words = {"sequence_parallel_size": 8, "ulysses_degree": 2, "route": route}
    words |= {"keep_gathered": True} if keep else {}
    at_once, chunked = (run_threads(8, sent_in_chunks, words, chunks) for chunks in (1, 2))
    assert at_once == chunked
    assert all(sent["forward ulysses qkv"] > 0 for sent in chunked)


def without_gradients(comm, chunks):
    """In eval: what comes out, in half precision, of tensors that want no gradient."""
    words = {"sequence_parallel_size": 4, "ulysses_degree": 2, "route": "ring"}
    sp = SequenceParallel(
        SequenceParallelConfig.from_dict(words | {"ulysses_chunks": chunks}), comm
    )
    q, k, v, _ = (sp.shard(x) for x in tensors(8, 4, torch.bfloat16))
    with torch.no_grad():
        return sp.unshard(sp.attention(q, k, v, causal=True))


def test_chunks_without_gradients_are_bit_for_bit_all_heads_at_once():
    for one, two in zip(*(run_threads(4, without_gradients, n) for n in (1, 2)), strict=True):
        assert torch.equal(one, two)


def wrong_chunks(comm, kv_heads, chunks):
    words = {"sequence_parallel_size": 2, "ulysses_degree": 2, "route": "ring"}
    config = SequenceParallelConfig.from_dict(words | {"ulysses_chunks": chunks})
    sp = SequenceParallel(config, comm)
    q, k, v, _ = (sp.shard(x) for x in tensors(8, kv_heads))
    with pytest.raises(ValueError, match="ulysses_chunks must divide") as caught:
        sp.attention(q, k, v)
    return str(caught.value)


@pytest.mark.parametrize(("kv_heads", "chunks", "told"), ((8, 3, "8 heads"), (2, 2, "2 heads")))
def test_chunks_that_the_heads_do_not_allow_are_refused_on_all_ranks(kv_heads, chunks, told):
    for said in run_threads(2, wrong_chunks, kv_heads, chunks):
        assert told in said and f"got {chunks}" in said


@pytest.mark.parametrize("moves", ("keys", "queries"))
def test_backward_route_and_direction(moves):
    words = {
        "sequence_parallel_size": 8,
        "route": {"name": "concentric", "team_size": 2},
        "backward_route": {"name": "mesh", "rows": 4, "cols": 2},
        "backward_moves": moves,
    }
    assert run_attend(words, 4, 2, {"causal": True})[0] < 1e-10


MOVES = ("keys", "queries") * 3
PLACED = (
    {"name": "concentric", "team_size": 2, "order": [2, 0, 1], "reverse": True},
    {"name": "concentric", "team_size": 2, "order": [1, 2, 0]},
    {"name": "ring", "reverse": True},
    {"name": "double_ring", "inner": 2, "order": [1, 0]},
    {"name": "mesh", "rows": 2, "cols": 2, "order": [1, 0], "reverse": True},
    {"name": "mesh", "rows": 4, "cols": 2, "order": [1, 0]},
)


@pytest.mark.parametrize("size", (4, 8))
@pytest.mark.parametrize("mask", range(len(MASKS)))
def test_placed_routes_are_exact(size, mask):
    """In forward and backward, each with another placement, keys and queries walking."""
    fits = [r for r in PLACED if "rows" not in r or r["rows"] * r["cols"] == size]
    for route, other, moves in zip(fits, fits[1:] + fits[:1], MOVES[: len(fits)], strict=True):
        words = {"sequence_parallel_size": size, "route": route, "backward_route": other}
        words |= {"backward_moves": moves, "kernel": "reference"}
        assert run_attend(words, 4, 2, MASKS[mask])[0] < 1e-10, words


def peers_of(comm, words):
    """To which ranks this rank sends in the forward."""
    sp = SequenceParallel(SequenceParallelConfig.from_dict(words), comm)
    q, k, v, _ = (sp.shard(x) for x in tensors(4, 4))
    peers, post = set(), comm._post

    def noted(label, sends, recvs):
        if label.startswith("forward"):
            peers.update(peer for peer, tensor in sends if tensor.numel())
        return post(label, sends, recvs)

    comm._post = noted
    sp.attention(q, k, v)
    return peers


def test_a_placement_sends_where_it_says():
    words = {"sequence_parallel_size": 4, "route": {"name": "ring"}}
    assert run_threads(4, peers_of, words) == [{3}, {0}, {1}, {2}]
    words["route"] = {"name": "ring", "reverse": True}
    assert run_threads(4, peers_of, words) == [{1}, {2}, {3}, {0}]


@pytest.mark.parametrize(("size", "mask"), ((4, 0), (4, 1), (4, 2), (8, 1), (8, 3)))
def test_a_size_alone_is_exact_whatever_is_chosen(size, mask):
    """Heads that allow every degree, some, and none beyond 1; links that hide nothing and all."""
    seen = set()
    more = ((8, 8), (6, 3)) if size == 4 else ()
    for heads, kv_heads in ((8, 2), (1, 1), *more):
        for gbit in (0.01, 100):
            words = {"sequence_parallel_size": size, "kernel": "reference"}
            topology = from_dict(bytes_count(gbit)).with_ranks(size)
            error, labels = run_attend(words, heads, kv_heads, MASKS[mask], topology)
            assert error < 1e-10, (heads, kv_heads, gbit)
            seen.add(frozenset.union(*labels))
    around, alone = ([s for s in seen if ("ulysses" in s) == traded] for traded in (True, False))
    assert alone and (around or "window_size" in MASKS[mask]), seen


NEAR = (
    {"causal": True, "cu_seqlens": [0, 3, 5, 6, 10, 14, 15, 20, 22, 25, 31, 33, 36, 40, SEQLEN]},
    {"causal": True, "window_size": (4, 0)},
)


@pytest.mark.parametrize("size", (8, 16))
@pytest.mark.parametrize("mask", NEAR, ids=("documents", "window"))
def test_what_is_planned_for_documents_and_windows_is_exact(size, mask):
    for gbit in (0.01, 100):
        words = {"sequence_parallel_size": size, "kernel": "reference"}
        topology = from_dict(bytes_count(gbit) | {"hosts": size // 4, "ranks_per_host": 4})
        error, _ = run_attend(words, 8, 2, mask, topology)
        assert error < 1e-10, gbit


def test_shards_may_go_two_ways():
    words = {"sequence_parallel_size": 4, "route": {"name": "ring", "two_way": True}}
    topology = from_dict(bytes_count(0.01)).with_ranks(4)
    assert run_attend(words, 4, 2, {"causal": True}, topology)[0] < 1e-10


@pytest.mark.parametrize("route", ({"name": "mesh", "rows": 4, "cols": 2}, "auto"))
@pytest.mark.parametrize("keep", (True, "auto"))
def test_what_was_gathered_may_be_kept(route, keep):
    words = {"sequence_parallel_size": 8, "route": route, "keep_gathered": keep}
    topology = from_dict(bytes_count(0.01)).with_ranks(8)
    assert run_attend(words, 8, 4, {"window_size": (20, 0)}, topology)[0] < 1e-10


@pytest.mark.parametrize("moves", ("keys", "queries"))
def test_keys_are_kept_that_only_later_steps_of_the_forward_read(moves):
    route = {"name": "concentric", "team_size": 2}
    words = {"sequence_parallel_size": 8, "route": route, "keep_gathered": True}
    words |= {"backward_moves": moves, "layout": "contiguous"}
    topology = from_dict(bytes_count(0.01)).with_ranks(8)
    assert run_attend(words, 8, 4, {"window_size": (20, 0)}, topology)[0] < 1e-10


def test_an_auto_degree_around_a_named_route():
    route = {"name": "concentric", "team_size": 2}
    words = {"sequence_parallel_size": 8, "route": route, "ulysses_degree": "auto"}
    topology = from_dict(bytes_count(0.01)).with_ranks(8)
    error, labels = run_attend(words, 8, 4, {"causal": True}, topology)
    assert error < 1e-10
    assert all("ulysses" in one for one in labels)


def attend_across(comm):
    """Cross attention with everything left open: 45 queries, 64 keys."""
    topology = from_dict(bytes_count(0.01))
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=4), comm, topology)
    q, k, v = tensors(8, 4)[0], *tensors(8, 4, seqlen=64)[1:3]
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = sp.unshard(sp.attention(sp.shard(q), sp.shard(k), sp.shard(v)))
    right = dense_attention(q, k, v, make_mask(), 8**-0.5)
    found = gradients(out, out, q, k, v)
    wanted = gradients(right, right, q, k, v)
    assert any("ulysses" in label for label in sp.report())
    return max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True))


def test_cross_attention_with_a_chosen_degree_is_exact():
    assert max(run_threads(4, attend_across)) < 1e-10


@pytest.mark.parametrize(
    ("degree", "heads", "kv_heads", "says"),
    (
        (4, 6, 2, "ulysses_degree 4 must divide the 6 attention heads"),
        (3, 12, 2, "ulysses_degree 3 must divide the 2 key heads, or be a multiple"),
    ),
)
def test_heads_that_do_not_divide_are_refused_with_both_numbers(degree, heads, kv_heads, says):
    words = {"sequence_parallel_size": degree, "ulysses_degree": degree, "route": "ring"}
    with pytest.raises(ValueError, match=says):
        run_attend(words, heads, kv_heads, {})


def bytes_on_auto(comm, topology):
    """The error of the output, full mask, many heads, and what a rank sends."""
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=4), comm, topology)
    q, k, v, _ = tensors(8, 8)
    out = sp.unshard(sp.attention(sp.shard(q), sp.shard(k), sp.shard(v)))
    right = dense_attention(q, k, v, make_mask(), 8**-0.5)
    return (out - right).abs().max().item(), set(sp.report()) - {"unshard"}


def test_auto_follows_the_topology():
    alone = run_threads(4, bytes_on_auto, None)
    apart = run_threads(4, bytes_on_auto, from_dict(bytes_count(100)))
    assert max(error for error, _ in (*alone, *apart)) < 1e-10
    assert alone[0][1] != apart[0][1]


def topology_of(comm, words, topology=None):
    sp = SequenceParallel(SequenceParallelConfig.from_dict(words), comm, topology)
    q, k, v, _ = tensors(8, 8)
    sp.attention(sp.shard(q), sp.shard(k), sp.shard(v))
    return sp._attention.cluster.topology(torch.device("cpu"))


def test_where_the_topology_comes_from(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = {"sequence_parallel_size": 4}
    assert run_threads(4, topology_of, words) == 4 * [one_host(4)]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(SLOW | {"hosts": 1, "ranks_per_host": 8, "name": "mine"}))
    read = run_threads(4, topology_of, words | {"topology": str(path)})
    assert {(t.name, t.size) for t in read} == {("mine", 4)}
    given = from_dict(SLOW)
    assert run_threads(4, topology_of, words | {"topology": str(path)}, given) == 4 * [given]
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.json"]
    measured = run_threads(4, topology_of, words | {"topology": "measure"})
    assert measured == 4 * measured[:1] and measured[0].name.startswith("measured on")
    assert len(list((tmp_path / "wallfacer").iterdir())) == 1


def test_a_topology_that_is_not_there_is_refused_before_a_call():
    config = SequenceParallelConfig(sequence_parallel_size=2, topology="nowhere.json")
    with pytest.raises(ValueError, match="a .json or .toml file that exists; got 'nowhere.json'"):
        run_threads(2, lambda comm: SequenceParallel(config, comm))


def report_of(comm, words):
    sp = SequenceParallel(SequenceParallelConfig.from_dict(words), comm)
    q, k, v, _ = (sp.shard(x) for x in tensors(4, 4, torch.float32, 64))
    sp.report()
    sp.attention(q, k, v)
    return sp.report(), sp.report()


def test_report_counts_bytes_since_the_last():
    ring = {"sequence_parallel_size": 4, "route": "ring"}
    unit = 2 * 16 * 4 * 8 * 4  # bytes of one rank's Q
    for first, second in run_threads(4, report_of, ring):
        assert first == {f"forward step {step}": 2 * unit for step in range(3)}
        assert second == {}
    ulysses = {"sequence_parallel_size": 4, "ulysses_degree": 4, "route": "ring"}
    for first, _ in run_threads(4, report_of, ulysses):
        assert sum(first.values()) == 3 * unit  # (P - 1)/P (2 + 2 kv)


def blocks(comm):
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=2, route="ring"), comm)
    x = torch.full((1, 8, 1, 4), float(comm.rank // 2), dtype=torch.float64)
    out = sp.unshard(sp.attention(*(sp.shard(x),) * 3))
    return sp.rank, sp.size, out.mean().item()


def test_a_larger_group_is_cut_into_data_parallel_blocks():
    assert run_threads(4, blocks) == [(0, 2, 0.0), (1, 2, 0.0), (0, 2, 1.0), (1, 2, 1.0)]


def model_loss(comm, size, valid):
    """Loss and gradient of one linear layer, with valid labels only on the first tokens."""
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=size), comm)
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 11, (2, 27), generator=random)
    labels = torch.where(torch.arange(27) < valid, ids, -100)
    weight = torch.randn(11, 11, generator=random, dtype=torch.float64).requires_grad_()
    local = sp.shard_batch({"input_ids": ids, "labels": labels})
    loss = sp.loss(weight[local["input_ids"]], local["labels"])
    loss.backward()
    right = cross_entropy(weight[ids[:, :-1]].flatten(0, 1), labels[:, 1:].flatten())
    (grad,) = torch.autograd.grad(right, weight)
    return sp.sum_over_ranks(loss), right.detach(), sp.sum_over_ranks(weight.grad), grad


@pytest.mark.parametrize("size", (1, 2, 3, 4))
@pytest.mark.parametrize("valid", (27, 13, 2))
def test_the_loss_is_that_of_one_device_however_labels_are_spread(size, valid):
    for loss, right, grad, right_grad in run_threads(size, model_loss, size, valid):
        torch.testing.assert_close(loss, right, rtol=1e-12, atol=0)
        torch.testing.assert_close(grad, right_grad, rtol=1e-12, atol=1e-14)


def batch_of(comm):
    config = SequenceParallelConfig(sequence_parallel_size=2, layout="zigzag")
    sp = SequenceParallel(config, comm)
    ids = torch.arange(1, 11)[None]
    return sp.shard_batch({"input_ids": ids, "labels": ids, "cu_seqlens": [0, 6, 10]})


def test_shard_batch_shifts_numbers_pads_and_cuts():
    first, second = run_threads(2, batch_of)
    assert first["input_ids"].tolist() == [[1, 2, 3, 10, 0, 0]]
    assert second["input_ids"].tolist() == [[4, 5, 6, 7, 8, 9]]
    assert first["labels"].tolist() == [[2, 3, 4, -100, -100, -100]]
    assert second["labels"].tolist() == [[5, 6, -100, 8, 9, 10]]
    assert first["position_ids"].tolist()[0][:4] == [0, 1, 2, 3]
    assert second["position_ids"].tolist() == [[3, 4, 5, 0, 1, 2]]
    assert first["cu_seqlens"] == second["cu_seqlens"] == (0, 6, 10, 12)


def attend_documents(comm, degree):
    """Documents of any length in the layout that follows from them, through shard_batch too."""
    words = {"layout": "document_zigzag", "ulysses_degree": degree, "route": "ring"}
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=4, **words), comm)
    borders = (0, 23, 26, 27, 40, SEQLEN)
    q, k, v, dout = tensors(4, 2)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    mine = (sp.shard(x, cu_seqlens=borders) for x in (q, k, v))
    local = sp.attention(*mine, causal=True, cu_seqlens=borders)
    out = sp.unshard(local, cu_seqlens=borders)
    right = dense_attention(q, k, v, make_mask(causal=True, cu_seqlens=borders), 8**-0.5)
    found = gradients(out, dout, q, k, v)
    wanted = gradients(right, dout, q, k, v)
    ids = torch.arange(SEQLEN)[None]
    batch = sp.shard_batch({"input_ids": ids, "labels": ids, "cu_seqlens": borders})
    mine = sp.positions(SEQLEN, cu_seqlens=borders)
    assert torch.equal(batch["input_ids"][0], mine)
    ends = torch.isin(mine + 1, torch.tensor(borders))
    assert torch.equal(batch["labels"][0], torch.where(ends, -100, mine + 1))
    return max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("degree", (1, 2))
def test_documents_of_any_length_are_exact_in_their_own_layout(degree):
    assert max(run_threads(4, attend_documents, degree)) < 1e-10


def cut_and_join(comm, layout, dim):
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=4, layout=layout), comm)
    x = torch.arange(2 * 19 * 3, dtype=torch.float64).reshape(2, 19, 3).movedim(1, dim)
    x = x.contiguous().requires_grad_()
    local = sp.shard(x, dim=dim)
    assert torch.equal(local, x.index_select(dim, sp.positions(19)))
    whole = sp.unshard(local, dim=dim)
    (grad,) = torch.autograd.grad((whole * whole).sum(), x)
    return torch.equal(whole, x) and torch.equal(grad, 2 * x)


@pytest.mark.parametrize("layout", ("contiguous", "zigzag"))
@pytest.mark.parametrize("dim", (0, 1, -1))
def test_unshard_undoes_shard_and_the_gradient_is_that_of_one_device(layout, dim):
    assert all(run_threads(4, cut_and_join, layout, dim))
