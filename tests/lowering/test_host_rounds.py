"""With a host size, a row of the side that stays crosses to a host once, and so do its results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product

import pytest

from tests.cases import schedules
from tests.schedule.positions import positions
from tests.slices import SLICES
from wf_backends.lowering.derivation import lower
from wf_backends.lowering.gather_rounds import delivery_rounds
from wf_backends.lowering.problem import Problem, Reads
from wf_backends.lowering.program import Parcels
from wf_backends.schedule.layout import contiguous, make_layout, zigzag
from wf_backends.schedule.mask import CAUSAL, FULL, Band, Mask, make_mask
from wf_backends.schedule.ranges import Ranges, globalize
from wf_backends.schedule.routes import all_gather, mesh

TOKENS = 64
MASKS = {
    "full": Mask(FULL),
    "causal": Mask(CAUSAL),
    "window": Mask(Band(20, 0)),
    "documents": Mask(CAUSAL, (0, 3, 5, 24, 47, TOKENS)),
}


def sent_to_other_hosts(
    parcels: Parcels, held: Ranges, rank: int, host_size: int
) -> Iterator[tuple[int, int]]:
    """(row, receiving host) of every row that a rank sends to another host from a buffer that
    holds the positions `held`."""
    for parcel in parcels:
        host = parcel.peer // host_size
        if host != rank // host_size:
            yield from ((row, host) for row in positions(globalize(parcel.rows, held)))


def crossings(problem: Problem, host_size: int) -> tuple[Counter, Counter]:
    """(row, host) -> how often the row is sent to the host, and how often its results leave it."""
    rows, results = Counter(), Counter()
    reads = Reads(problem)
    for rank in range(problem.schedule.num_ranks):
        shard, held, host = reads.stay_layout[rank], reads.stay_rows(rank), rank // host_size
        for round_ in (round_ for step in lower(problem, rank).steps for round_ in step.rounds):
            rows.update(sent_to_other_hosts(round_.fetch.send, shard, rank, host_size))
            rows.update(sent_to_other_hosts(round_.pass_on.send, held, rank, host_size))
            for exchange in (round_.reduce, round_.pass_back):
                sent = sent_to_other_hosts(exchange.send, held, rank, host_size)
                results.update((row, host) for row, _ in sent)
    return rows, results


def read_on_other_hosts(problem: Problem, host_size: int) -> set[tuple[int, int]]:
    """(row, host) of all rows that ranks of a host read and none of them owns."""
    reads, read, owned = Reads(problem), set(), set()
    for rank in range(problem.schedule.num_ranks):
        host = rank // host_size
        read |= {(row, host) for row in positions(reads.stay_rows(rank))}
        owned |= {(row, host) for row in positions(reads.stay_layout[rank])}
    return read - owned


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("n", "host_size"), ((4, 2), (8, 2), (8, 4), (6, 4)))
def test_a_row_and_its_results_cross_to_a_host_once(n, host_size, mask):
    """On every route and layout, whichever side stays."""
    routes_with_fewer_crossings = 0
    for schedule, layout, queries_walk in product(
        schedules(n).values(), (zigzag(n, TOKENS), contiguous(n, TOKENS)), (False, True)
    ):
        arguments = (schedule, layout, layout, MASKS[mask], queries_walk)
        problem = Problem(*arguments, host_size=host_size)
        rows, results = crossings(problem, host_size)
        assert rows == results == Counter(read_on_other_hosts(problem, host_size))
        rows_without_host_size, _ = crossings(Problem(*arguments), host_size)
        assert rows_without_host_size.keys() == rows.keys()
        routes_with_fewer_crossings += rows_without_host_size.total() > rows.total()
    assert routes_with_fewer_crossings > 0


@pytest.mark.parametrize("name", SLICES)
def test_a_row_of_slices_and_its_results_cross_to_a_host_once(name):
    mask = make_mask(**SLICES[name])
    layout = make_layout("balanced", 8, 48, slices=mask.slices)
    problem = Problem(all_gather(8), layout, layout, mask, True, host_size=4)
    rows, results = crossings(problem, 4)
    assert rows == results == Counter(read_on_other_hosts(problem, 4))


def test_all_ranks_of_a_host_fetch_equally_many_rows():
    layout = zigzag(16, 16 * 8)
    problem = Problem(mesh(16, 16, 1), layout, layout, Mask(FULL), host_size=4)
    for rank in range(16):
        fetched = [p for r in lower(problem, rank).steps[0].rounds for p in r.fetch.receive]
        from_other_hosts = [p.num_rows for p in fetched if p.peer // 4 != rank // 4]
        assert sum(from_other_hosts) == 12 * 8 // 4  # a quarter of the 12 shards of other hosts


@pytest.mark.parametrize(
    ("first_step", "rounds"),
    (
        (True, ("own", "near", "fetched 0", "fetched 1, passed 0", "passed 1")),
        (False, ("passed 0", "fetched 0, passed 1", "fetched 1", "near", "own")),
    ),
)
def test_the_rounds_of_two_bundles_are_those_of_the_picture(first_step, rounds):
    """Own rows are in the round `rest`; results are sent once all results for them arrived."""

    def index(name):
        (found,) = (i for i, names in enumerate(rounds) if name in names)
        return found

    for bundle in (0, 1):
        actual = delivery_rounds(first_step, bundle, 2, True)
        fetched, passed = index(f"fetched {bundle}"), index(f"passed {bundle}")
        assert actual == (index("own"), fetched, passed, max(fetched, passed + 1))
    near = index("near")
    assert delivery_rounds(first_step, None, 2, True) == (index("own"), near, near, near)
