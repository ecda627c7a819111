"""How rows of a walker get to their readers: forwarded by the rank of the step before, or sent by
their owner."""

from __future__ import annotations

from importlib import import_module

import pytest

from wf_backends.lowering.derivation import Problem, lower
from wf_backends.lowering.forwarding import WalkerRows
from wf_backends.lowering.tiles import seen
from wf_backends.schedule.layout import contiguous, zigzag
from wf_backends.schedule.mask import CAUSAL, Band, Mask
from wf_backends.schedule.routes import make_schedule, ring

problem_module = import_module("wf_backends.lowering.problem")

A, B, AB = ((0, 4),), ((4, 8),), ((0, 8),)
READ = (AB, A, (), AB)
"""By step: two readers one after the other, then none, then a reader of all rows."""
OWNED = (AB, (), (), ())
"""By step, the rows of the walker that the rank which holds it owns."""
TWO_RANKS_SHARE_A_DOCUMENT = Mask(CAUSAL, (0, 16, *range(24, 65, 8)))
"""64 tokens on 8 ranks: each other rank has a document of its own."""


def by_step(read, owned, gathers_all=False):
    """By step: (needed, forwarded, partials_forwarded, partials_to_owner)."""
    steps = range(len(read))
    rows = WalkerRows(read.__getitem__, owned.__getitem__, len(read), gathers_all)
    return [
        tuple(map(rows_of_step, steps))
        for rows_of_step in (
            rows.needed,
            rows.forwarded,
            rows.partials_forwarded,
            rows.partials_to_owner,
        )
    ]


def test_a_rank_holds_only_the_rows_that_it_reads():
    needed, forwarded, partials_forwarded, partials_to_owner = by_step(READ, OWNED)
    assert needed == READ
    assert forwarded == ((), (), (), ())  # the rank before is the owner, or does not read them
    assert partials_forwarded == ((), (), (), ())
    assert partials_to_owner == (AB, A, (), AB)


def test_a_reader_forwards_rows_that_the_next_rank_reads_and_their_partial_results():
    _, forwarded, partials_forwarded, partials_to_owner = by_step((A, AB, A, B), OWNED)
    assert forwarded == ((), (), A, ())
    assert partials_forwarded == ((), A, (), ())
    assert partials_to_owner == (A, B, A, B)


def test_an_owner_is_not_sent_its_own_rows_and_keeps_their_partial_results():
    _, forwarded, partials_forwarded, partials_to_owner = by_step((AB, AB, AB), ((), A, ()))
    assert forwarded == ((), B, B)
    assert partials_forwarded == (AB, B, ())
    assert partials_to_owner == ((), A, AB)


def test_a_walker_that_is_kept_gathers_the_rows_of_all_steps():
    owned = ((), (), ())
    needed, forwarded, _, partials_to_owner = by_step((A, (), B), owned, gathers_all=True)
    assert needed == (AB, (), B)
    assert forwarded == ((), (), ())
    assert partials_to_owner == (A, (), B)


def test_owners_send_the_rows_that_are_not_forwarded():
    rows = WalkerRows((A, AB, A, B).__getitem__, OWNED.__getitem__, 4)
    assert [rows.from_owner(step) for step in range(4)] == [A, AB, (), B]


def test_rows_for_a_later_step_arrive_during_the_last_step_that_computes():
    """Ranks 0 and 1 share a document, and on a ring of 8 rank 1 is the last to meet rank 0."""
    layout = contiguous(8, 64)
    steps = lower(Problem(ring(8), layout, layout, TWO_RANKS_SHARE_A_DOCUMENT), 1).steps
    assert [step.num_rows for step in steps] == [8, 0, 0, 0, 0, 0, 0, 8]
    assert [bool(step.owner.receive or step.hop.receive) for step in steps] == [True] + [False] * 7
    (parcel,) = steps[0].owner.receive
    assert (parcel.peer, parcel.num_rows, steps[0].next_num_rows) == (0, 8, 8)


def test_idle_steps_are_not_busy():
    layout = contiguous(8, 64)
    problem = Problem(ring(8), layout, layout, TWO_RANKS_SHARE_A_DOCUMENT)
    busy = [lower(problem, rank).busy_steps for rank in range(3)]
    assert busy == [(0, 1), (0, 1, 7), (0, 1)]  # step 1: gradients are sent to their owners
    assert lower(Problem(ring(8), layout, layout, Mask()), 0).busy_steps == tuple(range(8))


@pytest.mark.parametrize("mask", (Mask(CAUSAL), Mask(Band(48, 0))), ids=("causal", "window"))
@pytest.mark.parametrize("queries_walk", (False, True))
@pytest.mark.parametrize("name", ("ring", "mesh", "concentric"))
def test_lowering_one_rank_looks_at_few_pairs_of_shards(monkeypatch, name, queries_walk, mask):
    """The number of pairs grows with the number of ranks, not with its square."""
    pairs = []

    def counted_seen(*args):
        pairs.append(args)
        return seen(*args)

    def num_pairs(num_ranks):
        keys = {"mesh": {"rows": 4, "cols": num_ranks // 4}, "concentric": {"team_size": 4}}
        schedule = make_schedule({"name": name} | keys.get(name, {}), num_ranks)
        layout = zigzag(num_ranks, 32 * num_ranks)
        pairs.clear()
        lower(Problem(schedule, layout, layout, mask, queries_walk), num_ranks // 2)
        return len(pairs)

    monkeypatch.setattr(problem_module, "seen", counted_seen)
    pairs_of_64, pairs_of_256 = num_pairs(64), num_pairs(256)
    assert 0 < pairs_of_256 <= 6 * pairs_of_64  # four times the ranks; their square is 16 times
    assert pairs_of_256 < 24 * 256
