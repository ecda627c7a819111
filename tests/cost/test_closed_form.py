"""Closed forms of a pass's cost against the cost that is counted message by message."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from tests.cost.passes import KINDS, SHAPE, kind_id, route
from tests.planning import lab_cluster
from wf_backends.cost.closed_form import ClosedForm
from wf_backends.cost.exact_cost import pass_cost
from wf_backends.cost.route_shape import shape_of
from wf_backends.cost.workload import (
    BACKWARD_KEYS,
    FORWARD,
    Cost,
    HeadSplit,
    PassKind,
    Workload,
)
from wf_backends.schedule.mask import CAUSAL, Band, Mask
from wf_backends.schedule.placement import Placed, digits, place, placements


def exact_cost(split: HeadSplit, placed: Placed, kind: PassKind) -> Cost:
    return pass_cost(split, place(placed, split.route_size), kind)


def closed_cost(split: HeadSplit, placed: Placed, kind: PassKind) -> Cost:
    return ClosedForm(split, kind).cost(shape_of(placed, split))


@pytest.mark.parametrize(
    ("hosts", "ranks", "nics", "degree", "stride"),
    [
        *((2, 4, 1, 1, 1), (2, 4, 4, 1, 1), (4, 2, 2, 1, 1), (4, 4, 2, 1, 1)),
        *((4, 4, 4, 2, 1), (2, 8, 4, 4, 1)),
        *((4, 4, 4, 2, 8), (2, 8, 4, 4, 4), (4, 4, 2, 4, 4), (8, 2, 1, 2, 2)),
    ],
)
@pytest.mark.parametrize("keys", [None, 256])
def test_closed_forms_are_exact_for_a_full_mask(
    hosts: int, ranks: int, nics: int, degree: int, stride: int, keys: int | None
) -> None:
    """In the forward on every route; in the backward where walkers start at their owner on one
    ring. Times are exact on one ring; routes of two digits use two kinds of links in turn."""
    workload = Workload(SHAPE, 1024, keys=keys)
    split = HeadSplit(workload, lab_cluster(hosts, ranks, nics), degree, stride)
    for kind, placed in product((FORWARD, BACKWARD_KEYS), placements(split.route_size)):
        name = placed.route["name"]
        if name == "concentric" or (kind is BACKWARD_KEYS and name == "double_ring"):
            continue
        exact, closed = exact_cost(split, placed, kind), closed_cost(split, placed, kind)
        assert closed.nic_bytes == pytest.approx(exact.nic_bytes), placed
        assert closed.memory_bytes == pytest.approx(exact.memory_bytes), placed
        min_ratio = 0.8 if len(digits(placed.route, split.route_size)) > 1 else 0.999
        assert min_ratio * closed.seconds < exact.seconds < 1.001 * closed.seconds, placed


def concentric_rings(split: HeadSplit) -> list[Placed]:
    rings = [p for p in placements(split.route_size) if p.route["name"] == "concentric"]
    assert rings
    return rings


@pytest.mark.parametrize("kind", KINDS, ids=kind_id)
@pytest.mark.parametrize(("hosts", "ranks"), [(8, 1), (16, 1), (18, 1), (1, 8), (1, 16)])
def test_closed_forms_of_concentric_rings_are_exact_where_all_ranks_are_equally_far(
    hosts: int, ranks: int, kind: PassKind
) -> None:
    """One rank a host, or one host; sub-rings of one, two and four ranks. Times are within 4 %:
    closed forms take all ranks to keep step."""
    split = HeadSplit(Workload(SHAPE, 1152), lab_cluster(hosts, ranks, nics=1))
    for placed in concentric_rings(split):
        exact, closed = exact_cost(split, placed, kind), closed_cost(split, placed, kind)
        assert closed.nic_bytes == pytest.approx(exact.nic_bytes), placed
        assert closed.inside_bytes == pytest.approx(exact.inside_bytes), placed
        assert closed.memory_bytes == pytest.approx(exact.memory_bytes), placed
        assert closed.seconds == pytest.approx(exact.seconds, rel=0.04), placed


@pytest.mark.parametrize("kind", KINDS, ids=kind_id)
@pytest.mark.parametrize(
    ("hosts", "ranks", "nics"), [(2, 4, 1), (2, 4, 4), (4, 2, 2), (4, 4, 2), (4, 4, 4)]
)
def test_closed_forms_of_concentric_rings_never_count_fewer_bytes_of_a_nic(
    hosts: int, ranks: int, nics: int, kind: PassKind
) -> None:
    """They count all owners of a rank's first keys as on other hosts."""
    split = HeadSplit(Workload(SHAPE, 1024), lab_cluster(hosts, ranks, nics))
    for placed in concentric_rings(split):
        exact, closed = exact_cost(split, placed, kind), closed_cost(split, placed, kind)
        assert closed.nic_bytes >= 0.999 * exact.nic_bytes, placed
        assert closed.memory_bytes == pytest.approx(exact.memory_bytes), placed


@pytest.mark.parametrize(
    ("hosts", "ranks", "nics", "degree"),
    [(3, 4, 1, 1), (3, 4, 2, 1), (3, 4, 4, 1), (6, 4, 4, 2), (3, 8, 8, 2), (5, 2, 1, 1)],
)
def test_closed_forms_count_at_most_twice_the_bytes_where_hosts_hold_no_whole_digits(
    hosts: int, ranks: int, nics: int, degree: int
) -> None:
    """Such as a mesh of three rows on hosts of four ranks: the busiest host's bytes count."""
    split = HeadSplit(Workload(SHAPE, 960), lab_cluster(hosts, ranks, nics), degree)
    for placed in placements(split.route_size):
        if placed.route["name"] != "concentric":
            exact, closed = exact_cost(split, placed, FORWARD), closed_cost(split, placed, FORWARD)
            assert 0.999 * exact.nic_bytes <= closed.nic_bytes <= 2 * exact.nic_bytes, placed


@pytest.mark.parametrize("kind", KINDS, ids=kind_id)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_closed_forms_are_within_45_percent_for_a_causal_mask(layout: str, kind: PassKind) -> None:
    """They only sort candidates on more ranks than are counted."""
    workload = Workload(SHAPE, 4096, Mask(CAUSAL), layout)
    split = HeadSplit(workload, lab_cluster(4, 4, 4), degree=2)
    for placed in placements(8):
        exact, closed = exact_cost(split, placed, kind), closed_cost(split, placed, kind)
        assert closed.seconds == pytest.approx(exact.seconds, rel=0.45), placed


@pytest.mark.parametrize(
    ("layout", "window", "hops"),
    (("contiguous", 100, 1), ("contiguous", 250, 3), ("zigzag", 50, 2), ("zigzag", 150, 5)),
)
def test_a_window_ends_the_hops_in_both_counts(layout: str, window: int, hops: int) -> None:
    """100 tokens a rank, in one chunk or two. Closed forms count the rows of whole chunks.

    `hops` are those of the rank that ends last. With zigzag it reads the shards of up to three
    ranks on either side.
    """
    workload = Workload(SHAPE, 800, Mask(Band(window, 0)), layout)
    split = HeadSplit(workload, lab_cluster(8, 1, 1))
    ring = route(8, name="ring")
    exact, closed = exact_cost(split, ring, FORWARD), closed_cost(split, ring, FORWARD)
    assert len({span.label for span in exact.spans if span.kind == "transfer"}) == hops
    window_is_whole_chunks = window % (100 if layout == "contiguous" else 50) == 0
    if window_is_whole_chunks:
        assert closed.nic_bytes == exact.nic_bytes
    assert closed.nic_bytes >= exact.nic_bytes


@pytest.mark.parametrize("mask", (Mask(CAUSAL), Mask()), ids=str)
@pytest.mark.parametrize("stride", (1, 4))
def test_closed_forms_know_how_many_kernel_calls_groups_of_distant_ranks_take(
    stride: int, mask: Mask
) -> None:
    """A call takes a second, so that calls are all that counts. With stride 4 the rows of a group
    are many ranges, each of which sees other keys."""
    split = HeadSplit(Workload(SHAPE, 960, mask), lab_cluster(4, 4, 4, call_s=1.0), 4, stride)
    ring = route(4, name="ring")
    exact, closed = exact_cost(split, ring, FORWARD), closed_cost(split, ring, FORWARD)
    assert closed.compute_s == pytest.approx(exact.compute_s, rel=0.5)


@pytest.mark.parametrize("cost", (exact_cost, closed_cost))
@pytest.mark.parametrize("kind", (FORWARD, BACKWARD_KEYS), ids=lambda kind: kind.name)
@pytest.mark.parametrize("mask", (Mask(CAUSAL), Mask()), ids=str)
def test_hidden_keys_that_a_kernel_computes_take_time_in_both_counts(
    kind: PassKind, mask: Mask, cost
) -> None:
    """Five keys for each of a rank's own 24 rows, which are all on the diagonal."""
    topology, ring = lab_cluster(1, 4, 1), route(4, name="ring")
    (name, rate), *_ = topology.kernels
    wasteful = replace(topology, kernels=((name, replace(rate, diagonal_keys=5.0)),))
    split = HeadSplit(Workload(SHAPE, 96, mask), topology)
    wasteful_split = replace(split, topology=wasteful)
    added_s = cost(wasteful_split, ring, kind).compute_s - cost(split, ring, kind).compute_s
    expected_s = 24 * 5 * kind.seconds_per_score(split) * mask.band.edges
    assert added_s == pytest.approx(expected_s, abs=1e-12)
