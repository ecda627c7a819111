"""Bytes derived from plans: the closed forms of the literature, and what need not travel."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from tests.cases import schedules
from wf_backends.lowering.derivation import Problem, lower
from wf_backends.lowering.message_bytes import (
    Shape,
    backward_row_bytes,
    bytes_sent,
    forward_row_bytes,
)
from wf_backends.lowering.program import OWN_MESSAGE_ROWS
from wf_backends.schedule.layout import contiguous, make_layout, zigzag
from wf_backends.schedule.mask import CAUSAL, FULL, Band, Mask
from wf_backends.schedule.routes import concentric, double_ring, mesh, ring

ROWS = 8  # tokens of one rank
KV = 0.25
SHAPE = Shape(batch=1, heads=8, kv_heads=2, head_dim=64, itemsize=4)
UNIT = ROWS * 8 * 64 * 4  # bytes of one rank's Q


def units(schedule, layout="zigzag", mask=None, backward=False, queries_walk=False):
    """Units that each rank sends; statistics (lse, delta) are 1/64 of a unit each."""
    n = schedule.num_ranks
    where = make_layout(layout, n, n * ROWS)
    problem = Problem(schedule, where, where, mask or Mask(FULL), queries_walk)
    rows = backward_row_bytes(SHAPE, queries_walk) if backward else forward_row_bytes(SHAPE)
    return [sum(bytes_sent(lower(problem, r), rows, "pass").values()) / UNIT for r in range(n)]


@pytest.mark.parametrize("n", (1, 2, 3, 4, 8, 16))
def test_rings_send_what_the_papers_count(n):
    assert units(ring(n)) == [2 * KV * (n - 1)] * n
    assert units(ring(n), backward=True) == [4 * KV * (n - 1)] * n  # dK, dV: P - 1 hops, not P
    for inner in (d for d in (2, 4) if n % d == 0):
        assert units(double_ring(n, inner)) == units(ring(n))


@pytest.mark.parametrize(("rows", "cols"), ((2, 2), (2, 4), (4, 2), (4, 4), (8, 1), (1, 8)))
def test_a_mesh_sends_what_the_papers_count(rows, cols):
    lse = (rows - 1) / 64
    expected = 2 * (rows - 1) + 2 * KV * (cols - 1)
    assert units(mesh(rows, cols)) == pytest.approx([expected + lse] * (rows * cols))
    expected = 3 * (rows - 1) + 4 * KV * (cols - 1)
    sent = units(mesh(rows, cols), backward=True)
    assert sum(sent) / len(sent) == pytest.approx(expected + 2 * lse)


@pytest.mark.parametrize(("n", "team"), ((4, 2), (8, 2), (16, 2), (16, 4), (64, 4)))
def test_a_concentric_ring_sends_at_most_what_its_paper_counts(n, team):
    """Keys go straight to where they are first used, not by way of the team."""
    sent = units(concentric(n, team))
    counted = 2 * (team - 1) + 2 * KV * n / team + 2 * KV * (team - 1) + (team - 1) / 64
    saved = 2 * KV * (team - 1)
    own = 2 * KV * team / n * team  # what is needed where it already is, on average
    assert max(sent) <= counted - saved + 1e-9
    assert sum(sent) / n == pytest.approx(
        counted - saved - own * n / team / team / team, abs=2 * KV
    )


@pytest.mark.parametrize(("n", "least"), ((4, 0.2), (8, 0.25), (16, 0.25)))
def test_a_causal_zigzag_ring_saves_a_quarter(n, least):
    full, causal = (sum(units(ring(n), mask=Mask(band))) for band in (FULL, CAUSAL))
    assert 1 - causal / full >= least


def hops_of(problem: Problem, rank: int) -> int:
    """In how many steps a rank sends any rows of walkers."""
    steps = lower(problem, rank).steps
    return sum(bool(away(rank, step.hop_out, step.owner_out)) for step in steps)


def away(rank, *several):
    """The parcels that leave a rank."""
    return [parcel for parcels in several for parcel in parcels if parcel.peer != rank]


@pytest.mark.parametrize("queries_walk", (False, True))
@pytest.mark.parametrize("window", (1, 4, 8, 9, 20))
def test_a_window_stops_walking_after_the_shards_it_reaches(window, queries_walk):
    mask, reach = Mask(Band(window, 0)), -(-window // ROWS)
    where = contiguous(8, 8 * ROWS)
    for rank in range(8):
        assert hops_of(Problem(ring(8), where, where, mask, queries_walk), rank) <= reach
    where, reach = zigzag(8, 8 * ROWS), -(-window // (ROWS // 2))
    for rank in range(8):
        hops = hops_of(Problem(ring(8), where, where, mask, queries_walk), rank)
        assert hops <= 2 * reach  # in either direction


LAYOUTS = {"contiguous": contiguous, "zigzag": zigzag}
READ = {
    "full": Mask(FULL),
    "causal": Mask(CAUSAL),
    "window": Mask(Band(11, 0)),
    "two_sided": Mask(Band(5, 20)),
    "documents": Mask(CAUSAL, (0, 3, 5, 24, 47, 64)),
}


@pytest.mark.parametrize("mask", READ)
@pytest.mark.parametrize("where", LAYOUTS)
@pytest.mark.parametrize("queries_walk", (False, True))
def test_a_row_is_sent_once_to_each_rank_that_reads_it(mask, where, queries_walk):
    """To as many as there are, whoever lies between them: counted here pair by pair."""
    n, mask, layout = 8, READ[mask], LAYOUTS[where](8, 8 * ROWS)
    for name, schedule in schedules(n).items():
        problem = Problem(schedule, layout, layout, mask, queries_walk)
        sent, read = rows_sent(problem, n), rows_read(problem, layout, mask, queries_walk)
        relays = schedule.has_laps and mask == READ["causal"]  # laps use every NIC alike
        assert sent > read if relays else sent == read, name


def rows_sent(problem, n):
    """Rows of walkers that all ranks together send, in hops and to gather them."""
    plans = [lower(problem, rank) for rank in range(n)]
    several = [(plan.rank, step.hop_out, step.owner_out) for plan in plans for step in plan.steps]
    several += [(plan.rank, plan.walk.send) for plan in plans]
    return sum(parcel.num_rows for found in several for parcel in away(*found))


@pytest.mark.parametrize("window", (1, 4, 8, 9, 20))
def test_a_window_sends_a_row_as_many_hops_as_it_spans_shards(window):
    """On every route; keys that go to a team have one hop more to get there."""
    where, reach = contiguous(16, 16 * ROWS), -(-window // ROWS)
    for name, schedule in schedules(16).items():
        problem = Problem(schedule, where, where, Mask(Band(window, 0)))
        hops = reach + (name.startswith("concentric"))
        assert rows_sent(problem, 16) <= hops * ROWS * 16, name


def rows_read(problem, layout, mask, queries_walk):
    """Rows of walkers that ranks which do not own them read in some step."""
    roles = problem.schedule.swapped() if queries_walk else problem.schedule
    rows = [[row for start, stop in shard for row in range(start, stop)] for shard in layout]
    total = 0
    for origin in range(roles.num_ranks):
        for step in range(roles.num_steps):
            rank = roles.holder(step, origin)
            stay = [row for shard in roles.q[rank] for row in rows[shard]]
            for owner in set(roles.kv[origin]) - {rank}:
                for row in rows[owner]:
                    pairs = ((row, at) if queries_walk else (at, row) for at in stay)
                    total += any(allowed(mask, query, key) for query, key in pairs)
    return total


def allowed(mask, query, key):
    """Whether the mask lets a query see a key."""
    borders = mask.cu_seqlens or (0, 8 * ROWS)
    same = any(a <= query < b and a <= key < b for a, b in pairwise(borders))
    return same and -mask.band.left <= key - query <= mask.band.right


def test_documents_never_leave_the_ranks_that_hold_them():
    where = contiguous(4, 4 * ROWS)
    borders = tuple(range(0, 4 * ROWS + 1, ROWS))
    for backward in (False, True):
        assert units(ring(4), "contiguous", Mask(FULL, borders), backward) == [0] * 4
    crossing = Problem(ring(4), where, where, Mask(FULL, (0, 2 * ROWS, 4 * ROWS)))
    for rank in range(4):
        for step in lower(crossing, rank).steps:
            met = {tile.keys for tile in step.tiles}
            assert len(met) <= 1


@pytest.mark.parametrize("n", (2, 4, 6, 8, 9))
@pytest.mark.parametrize("queries_walk", (False, True))
@pytest.mark.parametrize(
    ("turn", "mask"),
    list(enumerate((Mask(FULL), Mask(CAUSAL), Mask(Band(5, 2)), Mask(CAUSAL, (0, 7, 36))))),
)
def test_every_send_has_its_receive(n, queries_walk, turn, mask):
    """Message by message: what a rank sends a peer is what the peer waits for, in that order.

    By turns the sequence is long, so that ranges are messages of their own.
    """
    long = (n + queries_walk + turn) % 2 == 0
    length = 36 * OWN_MESSAGE_ROWS if long else 36
    layout = zigzag(n, length)
    borders = mask.cu_seqlens and tuple(border * length // 36 for border in mask.cu_seqlens)
    mask = replace(mask, cu_seqlens=borders)
    for schedule in schedules(n).values():
        plans = [lower(Problem(schedule, layout, layout, mask, queries_walk), r) for r in range(n)]
        for a in range(n):
            for b in set(range(n)) - {a}:
                assert _sent(plans[a], b) == _received(plans[b], a)


def _sent(plan, peer):
    return _in_order(plan, peer, "send")


def _received(plan, peer):
    return _in_order(plan, peer, "receive")


def _in_order(plan, peer, way):
    """Rows of the messages from or to a peer, in the order in which a rank posts them."""
    sends = way == "send"
    parcels = [*(plan.walk.send if sends else plan.walk.receive)]
    parcels += [p for one in plan.steps[0].rounds for p in getattr(one.fetch, way)]
    last = None
    for step in (*plan.steps, None):
        if step:
            parcels += step.hop_out if sends else step.hop_in
        if last:
            parcels += last.partial_out if sends else step.partial_in if step else ()
            parcels += last.home_out if sends else last.home_in
        if step:
            parcels += step.owner_out if sends else step.owner_in
        if step:
            parcels += [p for one in step.rounds for p in getattr(one.home, way)]
        last = step
    return [p.num_rows for p in parcels if p.peer == peer]
