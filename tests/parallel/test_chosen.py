"""Attention with the planner's choices: exact beside dense attention, and fit for the topology."""

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

SLOW_GBIT, FAST_GBIT = 0.01, 100  # between hosts: with which all time, or none, goes into messages


def slow_links(size):
    return from_dict(without_latency(SLOW_GBIT)).with_ranks(size)


@pytest.mark.parametrize(("size", "mask"), ((4, 0), (4, 1), (4, 2), (8, 1), (8, 3)))
def test_a_size_alone_is_exact_whatever_is_chosen(size, mask):
    """On slow and fast links, with heads that allow every degree, some degrees, and 1 alone.

    Some of these plans trade heads (but under windows none need), some do not.
    """
    labels_of_plans = set()
    more_heads = ((8, 8), (6, 3)) if size == 4 else ()
    for heads, kv_heads in ((8, 2), (1, 1), *more_heads):
        for gbit in (SLOW_GBIT, FAST_GBIT):
            config = {"sequence_parallel_size": size, "kernel": "reference"}
            topology = from_dict(without_latency(gbit)).with_ranks(size)
            error, labels = run_attend(config, heads, kv_heads, MASKS[mask], topology)
            assert error < 1e-10, (heads, kv_heads, gbit)
            labels_of_plans.add(frozenset.union(*labels))
    trades_heads = {"ulysses" in labels for labels in labels_of_plans}
    assert False in trades_heads, labels_of_plans
    assert True in trades_heads or "window_size" in MASKS[mask], labels_of_plans


def test_an_empty_batch_is_planned_for():
    """The exchange of its heads sends no byte over any link."""

    def rank(comm):
        sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=comm.size), comm)
        x = torch.zeros(0, SEQLEN // comm.size, 2, 8)
        assert sp.attention(x, x, x).shape == x.shape

    run_threads(2, rank)


NEAR = (
    {"causal": True, "cu_seqlens": [0, 3, 5, 6, 10, 14, 15, 20, 22, 25, 31, 33, 36, 40, SEQLEN]},
    {"causal": True, "window_size": (4, 0)},
)


@pytest.mark.parametrize("size", (8, 16))
@pytest.mark.parametrize("mask", NEAR, ids=("documents", "window"))
def test_plans_for_short_documents_and_windows_are_exact(size, mask):
    for gbit in (SLOW_GBIT, FAST_GBIT):
        config = {"sequence_parallel_size": size, "kernel": "reference"}
        topology = from_dict(without_latency(gbit) | {"hosts": size // 4, "ranks_per_host": 4})
        error, _ = run_attend(config, 8, 2, mask, topology)
        assert error < 1e-10, gbit


@pytest.mark.parametrize("route", ({"name": "mesh", "rows": 4, "cols": 2}, "auto"))
@pytest.mark.parametrize("keep", (True, "auto"))
def test_keeping_gathered_rows_is_exact(route, keep):
    config = {"sequence_parallel_size": 8, "route": route, "keep_gathered": keep}
    assert run_attend(config, 8, 4, {"window_size": (20, 0)}, slow_links(8))[0] < 1e-10


@pytest.mark.parametrize("moves", ("keys", "queries"))
def test_keeping_keys_that_only_later_steps_of_the_forward_read_is_exact(moves):
    config = {
        "sequence_parallel_size": 8,
        "route": {"name": "concentric", "team_size": 2},
        "keep_gathered": True,
        "backward_moves": moves,
        "layout": "contiguous",
    }
    assert run_attend(config, 8, 4, {"window_size": (20, 0)}, slow_links(8))[0] < 1e-10


def test_auto_degree_around_a_named_route_trades_heads_and_is_exact():
    route = {"name": "concentric", "team_size": 2}
    config = {"sequence_parallel_size": 8, "route": route, "ulysses_degree": "auto"}
    error, labels_by_rank = run_attend(config, 8, 4, {"causal": True}, slow_links(8))
    assert error < 1e-10
    assert all("ulysses" in labels for labels in labels_by_rank)


def cross_attention_error(comm):
    """The worst error of out, dq, dk and dv: 45 queries, 64 keys, everything left open."""
    topology = from_dict(without_latency(SLOW_GBIT))
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=4), comm, topology)
    q, k, v = tensors(8, 4)[0], *tensors(8, 4, seqlen=64)[1:3]
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = sp.unshard(sp.attention(sp.shard(q), sp.shard(k), sp.shard(v)))
    dense = dense_attention(q, k, v, make_mask(), 8**-0.5)
    actual = gradients(out, out, q, k, v)
    expected = gradients(dense, dense, q, k, v)
    assert any("ulysses" in label for label in sp.report())
    return largest((a - b).abs().max().item() for a, b in zip(actual, expected, strict=True))


def test_cross_attention_with_a_chosen_degree_is_exact():
    assert largest(run_threads(4, cross_attention_error)) < 1e-10


def test_the_first_rank_of_the_job_alone_logs_a_choice(caplog):
    """Of two sequences, whose ranks share no default group of torch, as under MPI."""

    def rank(comm):
        sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=2), comm)
        x = torch.zeros(1, 8, 2, 8)
        sp.attention(x, x, x)

    run_threads(4, rank)
    assert len([text for text in caplog.messages if text.startswith("attention by ")]) == 1


def error_and_labels(comm, topology):
    """The error of the output under a full mask with 8 heads, and the labels of all messages."""
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=4), comm, topology)
    q, k, v, _ = tensors(8, 8)
    out = sp.unshard(sp.attention(sp.shard(q), sp.shard(k), sp.shard(v)))
    expected = dense_attention(q, k, v, make_mask(), 8**-0.5)
    return (out - expected).abs().max().item(), set(sp.report()) - {"unshard"}


def test_slow_and_fast_links_get_different_plans():
    slow = run_threads(4, error_and_labels, from_dict(without_latency(SLOW_GBIT)))
    fast = run_threads(4, error_and_labels, from_dict(without_latency(FAST_GBIT)))
    assert largest(error for error, _ in (*slow, *fast)) < 1e-10
    assert slow[0][1] != fast[0][1]


def topology_of(comm, options, topology=None):
    """The topology that the planner gets in a call."""
    sp = SequenceParallel(SequenceParallelConfig.from_dict(options), comm, topology)
    q, k, v, _ = tensors(8, 8)
    sp.attention(sp.shard(q), sp.shard(k), sp.shard(v))
    return sp._attention.topology.find(torch.device("cpu"))


SIZE_4 = {"sequence_parallel_size": 4}


@pytest.fixture
def topology_file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(SLOW_TOPOLOGY | {"hosts": 1, "ranks_per_host": 8, "name": "mine"}))
    return str(path)


def test_the_default_topology_is_one_host():
    assert run_threads(4, topology_of, SIZE_4) == 4 * [one_host(4)]


def test_topology_of_the_config_is_read_from_its_file(topology_file):
    topologies = run_threads(4, topology_of, SIZE_4 | {"topology": topology_file})
    assert {(topology.name, topology.size) for topology in topologies} == {("mine", 4)}


def test_topology_argument_replaces_that_of_the_config(topology_file):
    argument = from_dict(SLOW_TOPOLOGY)
    options = SIZE_4 | {"topology": topology_file}
    assert run_threads(4, topology_of, options, argument) == 4 * [argument]


def test_topology_is_measured_and_cached_only_on_demand(tmp_path, topology_file, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    run_threads(4, topology_of, SIZE_4)
    run_threads(4, topology_of, SIZE_4 | {"topology": topology_file})
    run_threads(4, topology_of, SIZE_4, from_dict(SLOW_TOPOLOGY))
    assert not cache.exists()
    measured = run_threads(4, topology_of, SIZE_4 | {"topology": "measure"})
    assert measured == 4 * measured[:1] and measured[0].name.startswith("measured on")
    assert len(list((cache / "wallfacer").iterdir())) == 1


def test_a_topology_file_that_does_not_exist_is_refused_before_a_call():
    config = SequenceParallelConfig(sequence_parallel_size=2, topology="nowhere.json")
    with pytest.raises(ValueError, match="a .json or .toml file that exists; got 'nowhere.json'"):
        run_threads(2, lambda comm: SequenceParallel(config, comm))
