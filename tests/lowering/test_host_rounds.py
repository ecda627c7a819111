"""A row of the side that stays crosses to a host once, and so do its results: row by row."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from tests.cases import schedules
from tests.slices import SLICES
from wf_backends.lowering.derivation import lower
from wf_backends.lowering.gather_rounds import rounds_of_bundle
from wf_backends.lowering.problem import Problem, Reads
from wf_backends.schedule.layout import contiguous, make_layout, zigzag
from wf_backends.schedule.mask import CAUSAL, FULL, Band, Mask, make_mask
from wf_backends.schedule.ranges import globalize
from wf_backends.schedule.routes import all_gather, mesh

TOKENS = 64
MASKS = {
    "full": Mask(FULL),
    "causal": Mask(CAUSAL),
    "window": Mask(Band(20, 0)),
    "documents": Mask(CAUSAL, (0, 3, 5, 24, 47, TOKENS)),
}


def crossings(problem: Problem, host_size: int) -> tuple[Counter, Counter]:
    """(row, host) -> how often the row is sent to the host, and its results from the host."""
    rows, results = Counter(), Counter()
    reads = Reads(problem)

    def count(found, parcels, held, rank, host_of):
        for parcel in parcels:
            if rank // host_size != parcel.peer // host_size:
                for start, stop in globalize(parcel.rows, held):
                    found.update((row, host_of(rank, parcel.peer)) for row in range(start, stop))

    for rank in range(problem.schedule.num_ranks):
        home, held = reads.stay_layout[rank], reads.stay_rows(rank)
        for one in (one for step in lower(problem, rank).steps for one in step.rounds):
            count(rows, one.fetch.send, home, rank, lambda _, peer: peer // host_size)
            count(rows, one.pass_on.send, held, rank, lambda _, peer: peer // host_size)
            count(results, one.home.send, held, rank, lambda rank, _: rank // host_size)
            count(results, one.pass_back.send, held, rank, lambda rank, _: rank // host_size)
    return rows, results


def read(problem: Problem, host_size: int) -> set[tuple[int, int]]:
    """(row, host) of all rows that ranks of a host read and none of them owns."""
    reads, found = Reads(problem), set()
    for rank in range(problem.schedule.num_ranks):
        host = rank // host_size
        found |= {(row, host) for a, b in reads.stay_rows(rank) for row in range(a, b)}
    for rank in range(problem.schedule.num_ranks):
        host = rank // host_size
        found -= {(row, host) for a, b in reads.stay_layout[rank] for row in range(a, b)}
    return found


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("n", "host_size"), ((4, 2), (8, 2), (8, 4), (6, 4)))
def test_a_row_crosses_to_a_host_once(n, host_size, mask):
    """Whatever the route, the mask, and which side stays; and its results come back once."""
    several = 0
    for schedule, layout, walks in product(
        schedules(n).values(), (zigzag(n, TOKENS), contiguous(n, TOKENS)), (False, True)
    ):
        told = (schedule, layout, layout, MASKS[mask], walks)
        once = Problem(*told, host_size=host_size)
        rows, results = crossings(once, host_size)
        assert rows == results == Counter(read(once, host_size))
        before, _ = crossings(Problem(*told), host_size)
        assert before.keys() == rows.keys()
        several += before.total() > rows.total()
    assert several  # there are routes on which they crossed several times


def test_slices_cross_once_too():
    for words in SLICES.values():
        mask = make_mask(**words)
        layout = make_layout("balanced", 8, 48, slices=mask.slices)
        once = Problem(all_gather(8), layout, layout, mask, True, host_size=4)
        rows, results = crossings(once, 4)
        assert rows == results == Counter(read(once, 4))


def test_all_ranks_of_a_host_fetch_alike():
    layout = zigzag(16, 16 * 8)
    once = Problem(mesh(16, 1), layout, layout, Mask(FULL), host_size=4)
    for rank in range(16):
        fetched = [one.fetch.receive for one in lower(once, rank).steps[0].rounds]
        far = [p.num_rows for ps in fetched for p in ps if p.peer // 4 != rank // 4]
        assert sum(far) == 3 * 8  # a quarter of 12 shards


def test_what_is_passed_on_is_computed_after_what_was_fetched():
    first, later = rounds_of_bundle(True, 1, 3, True), rounds_of_bundle(False, 1, 3, True)
    assert first.rest < first.near < first.fetched < first.passed < first.home
    assert later.passed < later.fetched == later.home < later.near < later.rest
