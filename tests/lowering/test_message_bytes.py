"""Bytes derived from programs: the closed forms of the papers, and rows that need not be sent."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.cases import schedules
from tests.schedule.positions import positions
from tests.sent_bytes import bytes_sent
from wf_backends.lowering.derivation import Problem, lower
from wf_backends.lowering.message_bytes import (
    Shape,
    backward_row_bytes,
    forward_row_bytes,
)
from wf_backends.schedule.layout import contiguous, make_layout, zigzag
from wf_backends.schedule.mask import CAUSAL, FULL, Band, Mask
from wf_backends.schedule.routes import concentric, double_ring, mesh, ring

ROWS = 8  # tokens of one rank
SHAPE = Shape(batch=1, heads=8, kv_heads=2, head_dim=64, itemsize=4)
UNIT = ROWS * 8 * 64 * 4  # bytes of one rank's Q
KV = 0.25  # units of one rank's K, and of its V
LSE = 1 / 64  # units of one rank's lse, and of its delta
LAYOUTS = {"contiguous": contiguous, "zigzag": zigzag}
MASKS = {
    "full": Mask(FULL),
    "causal": Mask(CAUSAL),
    "window": Mask(Band(11, 0)),
    "two_sided": Mask(Band(5, 20)),
    "documents": Mask(CAUSAL, (0, 3, 5, 24, 47, 64)),
}


def units_sent(schedule, layout="zigzag", mask=MASKS["full"], backward=False):
    """By rank, the units that it sends in a pass."""
    n = schedule.num_ranks
    shards = make_layout(layout, n, n * ROWS)
    problem = Problem(schedule, shards, shards, mask)
    row_bytes = backward_row_bytes(SHAPE) if backward else forward_row_bytes(SHAPE)
    by_label = [bytes_sent(lower(problem, rank), row_bytes, "pass") for rank in range(n)]
    return [sum(labels.values()) / UNIT for labels in by_label]


@pytest.mark.parametrize("n", (1, 2, 3, 4, 8, 16))
def test_rings_send_the_bytes_that_the_papers_count(n):
    assert units_sent(ring(n)) == [2 * KV * (n - 1)] * n
    assert units_sent(ring(n), backward=True) == [4 * KV * (n - 1)] * n  # dK, dV: P - 1 hops, not P
    for inner in (d for d in (2, 4) if n % d == 0):
        assert units_sent(double_ring(n, inner)) == units_sent(ring(n))


@pytest.mark.parametrize(("rows", "cols"), ((2, 2), (2, 4), (4, 2), (4, 4), (8, 1), (1, 8)))
def test_a_mesh_sends_the_bytes_that_the_papers_count(rows, cols):
    forward = (2 + LSE) * (rows - 1) + 2 * KV * (cols - 1)
    route = mesh(rows * cols, rows, cols)
    assert units_sent(route) == pytest.approx([forward] * (rows * cols))
    backward = (3 + 2 * LSE) * (rows - 1) + 4 * KV * (cols - 1)
    sent = units_sent(route, backward=True)
    assert sum(sent) / len(sent) == pytest.approx(backward)


@pytest.mark.parametrize(("n", "team"), ((4, 2), (8, 2), (16, 2), (16, 4), (64, 4)))
def test_a_concentric_ring_sends_at_most_the_bytes_that_its_paper_counts(n, team):
    """Keys go straight to the ranks that first use them, not by way of the team."""
    sent = units_sent(concentric(n, team))
    by_way_of_the_team = 2 * KV * (team - 1)
    paper = (2 + LSE) * (team - 1) + 2 * KV * n / team + by_way_of_the_team
    own_keys = 2 * KV / team  # of ranks that first use their own, on average
    assert max(sent) <= paper - by_way_of_the_team + 1e-9
    assert sum(sent) / n == pytest.approx(paper - by_way_of_the_team - own_keys, abs=2 * KV)


@pytest.mark.parametrize(("n", "min_saving"), ((4, 0.2), (8, 0.25), (16, 0.25)))
def test_a_causal_zigzag_ring_sends_a_quarter_less(n, min_saving):
    full, causal = (sum(units_sent(ring(n), mask=Mask(band))) for band in (FULL, CAUSAL))
    assert 1 - causal / full >= min_saving


def sent_to_others(rank, *parcels_of_messages):
    """The parcels that leave a rank."""
    return [p for parcels in parcels_of_messages for p in parcels if p.peer != rank]


def steps_that_send_walkers(problem, rank):
    """In how many steps a rank sends any rows of walkers."""
    steps = lower(problem, rank).steps
    return sum(bool(sent_to_others(rank, step.hop.send, step.owner.send)) for step in steps)


@pytest.mark.parametrize("queries_walk", (False, True))
@pytest.mark.parametrize("window", (1, 4, 8, 9, 20))
@pytest.mark.parametrize(
    ("layout", "chunk_rows", "chunks"), (("contiguous", ROWS, 1), ("zigzag", ROWS // 2, 2))
)
def test_walkers_stop_where_the_window_ends(layout, chunk_rows, chunks, window, queries_walk):
    """Each chunk of a shard goes as many hops as the window reaches chunks, in one direction."""
    shards = make_layout(layout, 8, 8 * ROWS)
    problem = Problem(ring(8), shards, shards, Mask(Band(window, 0)), queries_walk)
    reach = -(-window // chunk_rows)
    for rank in range(8):
        assert steps_that_send_walkers(problem, rank) <= chunks * reach


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("where", LAYOUTS)
@pytest.mark.parametrize("queries_walk", (False, True))
def test_a_row_is_sent_once_to_each_rank_that_reads_it(mask, where, queries_walk):
    """Whichever ranks lie between."""
    n, layout = 8, LAYOUTS[where](8, 8 * ROWS)
    for name, schedule in schedules(n).items():
        problem = Problem(schedule, layout, layout, MASKS[mask], queries_walk)
        sent, read = walker_rows_sent(problem), walker_rows_read(problem)
        assert sent == read, name


@pytest.mark.parametrize("window", (1, 4, 8, 9, 20))
def test_a_row_is_sent_at_most_as_often_as_a_window_reaches_shards(window):
    """On every route; keys of a team are sent once more, to the rank that first uses them."""
    layout, reach = contiguous(16, 16 * ROWS), -(-window // ROWS)
    for name, schedule in schedules(16).items():
        problem = Problem(schedule, layout, layout, Mask(Band(window, 0)))
        times = reach + (name.startswith("concentric"))
        assert walker_rows_sent(problem) <= times * ROWS * 16, name


def walker_rows_sent(problem):
    """Rows of walkers that all ranks together send, in hops and to gather them."""
    total = 0
    for rank in range(problem.schedule.num_ranks):
        program = lower(problem, rank)
        messages = [
            parcels for step in program.steps for parcels in (step.hop.send, step.owner.send)
        ]
        parcels = sent_to_others(rank, program.walk.send, *messages)
        total += sum(parcel.num_rows for parcel in parcels)
    return total


def walker_rows_read(problem):
    """Rows of walkers that ranks which do not own them read in some step, counted pair by pair."""
    schedule = problem.schedule.swapped() if problem.queries_walk else problem.schedule
    rows_of_shard = [positions(shard) for shard in problem.q_layout]
    total = 0
    for origin in range(schedule.num_ranks):
        for step in range(schedule.num_steps):
            rank = schedule.holders[step][origin]
            stay = [row for shard in schedule.q[rank] for row in rows_of_shard[shard]]
            for owner in set(schedule.kv[origin]) - {rank}:
                total += sum(meets_any(problem, row, stay) for row in rows_of_shard[owner])
    return total


def meets_any(problem, row, stay):
    """Whether a row of a walker sees, or is seen by, any row of the side that stays."""
    if problem.queries_walk:
        return any(is_visible(problem.mask, row, key) for key in stay)
    return any(is_visible(problem.mask, query, row) for query in stay)


def is_visible(mask, query, key):
    """Whether the mask lets a query see a key."""
    borders = mask.cu_seqlens or (0, 8 * ROWS)
    same_document = any(a <= query < b and a <= key < b for a, b in pairwise(borders))
    return same_document and -mask.band.left <= key - query <= mask.band.right


@pytest.mark.parametrize("backward", (False, True))
def test_documents_of_one_rank_are_not_sent(backward):
    borders = tuple(range(0, 4 * ROWS + 1, ROWS))
    assert units_sent(ring(4), "contiguous", Mask(FULL, borders), backward) == [0] * 4


def test_a_step_has_tiles_of_one_document_at_most():
    """Two documents of two ranks each: a walker's rows belong to one of them."""
    layout = contiguous(4, 4 * ROWS)
    problem = Problem(ring(4), layout, layout, Mask(FULL, (0, 2 * ROWS, 4 * ROWS)))
    for rank in range(4):
        for step in lower(problem, rank).steps:
            assert len({tile.keys for r in step.rounds for tile in r.tiles}) <= 1
