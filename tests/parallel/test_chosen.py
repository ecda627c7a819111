"""What the planner chooses for a call is exact, and follows the topology."""

from __future__ import annotations

import json

import pytest
import torch

from tests.dense import dense_attention, largest
from tests.helpers import run_threads
from tests.sequences import (
    MASKS,
    SEQLEN,
    SLOW_TOPOLOGY,
    gradients,
    run_attend,
    tensors,
    without_latency,
)
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.cluster.presets import one_host
from wf_backends.cluster.topology import from_dict
from wf_backends.schedule.mask import make_mask


@pytest.mark.parametrize(("size", "mask"), ((4, 0), (4, 1), (4, 2), (8, 1), (8, 3)))
def test_a_size_alone_is_exact_whatever_is_chosen(size, mask):
    """Heads that allow every degree, some, and none beyond 1; links that hide nothing and all."""
    seen = set()
    more = ((8, 8), (6, 3)) if size == 4 else ()
    for heads, kv_heads in ((8, 2), (1, 1), *more):
        for gbit in (0.01, 100):
            words = {"sequence_parallel_size": size, "kernel": "reference"}
            topology = from_dict(without_latency(gbit)).with_ranks(size)
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
        topology = from_dict(without_latency(gbit) | {"hosts": size // 4, "ranks_per_host": 4})
        error, _ = run_attend(words, 8, 2, mask, topology)
        assert error < 1e-10, gbit


@pytest.mark.parametrize("route", ({"name": "mesh", "rows": 4, "cols": 2}, "auto"))
@pytest.mark.parametrize("keep", (True, "auto"))
def test_what_was_gathered_may_be_kept(route, keep):
    words = {"sequence_parallel_size": 8, "route": route, "keep_gathered": keep}
    topology = from_dict(without_latency(0.01)).with_ranks(8)
    assert run_attend(words, 8, 4, {"window_size": (20, 0)}, topology)[0] < 1e-10


@pytest.mark.parametrize("moves", ("keys", "queries"))
def test_keys_are_kept_that_only_later_steps_of_the_forward_read(moves):
    route = {"name": "concentric", "team_size": 2}
    words = {"sequence_parallel_size": 8, "route": route, "keep_gathered": True}
    words |= {"backward_moves": moves, "layout": "contiguous"}
    topology = from_dict(without_latency(0.01)).with_ranks(8)
    assert run_attend(words, 8, 4, {"window_size": (20, 0)}, topology)[0] < 1e-10


def test_an_auto_degree_around_a_named_route():
    route = {"name": "concentric", "team_size": 2}
    words = {"sequence_parallel_size": 8, "route": route, "ulysses_degree": "auto"}
    topology = from_dict(without_latency(0.01)).with_ranks(8)
    error, labels = run_attend(words, 8, 4, {"causal": True}, topology)
    assert error < 1e-10
    assert all("ulysses" in one for one in labels)


def attend_across(comm):
    """Cross attention with everything left open: 45 queries, 64 keys."""
    topology = from_dict(without_latency(0.01))
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=4), comm, topology)
    q, k, v = tensors(8, 4)[0], *tensors(8, 4, seqlen=64)[1:3]
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = sp.unshard(sp.attention(sp.shard(q), sp.shard(k), sp.shard(v)))
    right = dense_attention(q, k, v, make_mask(), 8**-0.5)
    found = gradients(out, out, q, k, v)
    wanted = gradients(right, right, q, k, v)
    assert any("ulysses" in label for label in sp.report())
    return largest((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True))


def test_cross_attention_with_a_chosen_degree_is_exact():
    assert largest(run_threads(4, attend_across)) < 1e-10


def bytes_on_auto(comm, topology):
    """The error of the output, full mask, many heads, and what a rank sends."""
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=4), comm, topology)
    q, k, v, _ = tensors(8, 8)
    out = sp.unshard(sp.attention(sp.shard(q), sp.shard(k), sp.shard(v)))
    right = dense_attention(q, k, v, make_mask(), 8**-0.5)
    return (out - right).abs().max().item(), set(sp.report()) - {"unshard"}


def test_auto_follows_the_topology():
    slow = run_threads(4, bytes_on_auto, from_dict(without_latency(0.01)))
    fast = run_threads(4, bytes_on_auto, from_dict(without_latency(100)))
    assert largest(error for error, _ in (*slow, *fast)) < 1e-10
    assert slow[0][1] != fast[0][1]


def topology_of(comm, words, topology=None):
    sp = SequenceParallel(SequenceParallelConfig.from_dict(words), comm, topology)
    q, k, v, _ = tensors(8, 8)
    sp.attention(sp.shard(q), sp.shard(k), sp.shard(v))
    return sp._attention.topology.find(torch.device("cpu"))


def test_where_the_topology_comes_from(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = {"sequence_parallel_size": 4}
    assert run_threads(4, topology_of, words) == 4 * [one_host(4)]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(SLOW_TOPOLOGY | {"hosts": 1, "ranks_per_host": 8, "name": "mine"}))
    read = run_threads(4, topology_of, words | {"topology": str(path)})
    assert {(t.name, t.size) for t in read} == {("mine", 4)}
    given = from_dict(SLOW_TOPOLOGY)
    assert run_threads(4, topology_of, words | {"topology": str(path)}, given) == 4 * [given]
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.json"]
    measured = run_threads(4, topology_of, words | {"topology": "measure"})
    assert measured == 4 * measured[:1] and measured[0].name.startswith("measured on")
    assert len(list((tmp_path / "wallfacer").iterdir())) == 1


def test_a_topology_that_is_not_there_is_refused_before_a_call():
    config = SequenceParallelConfig(sequence_parallel_size=2, topology="nowhere.json")
    with pytest.raises(ValueError, match="a .json or .toml file that exists; got 'nowhere.json'"):
        run_threads(2, lambda comm: SequenceParallel(config, comm))
