"""How a walker's rows get to their readers: by the rank before, or from their owner."""

from __future__ import annotations

from importlib import import_module

import pytest

from wf_backends.lowering.derivation import Problem, lower
from wf_backends.lowering.forwarding import RelayedRows, WalkerRows, read_from_step_on
from wf_backends.lowering.tiles import seen
from wf_backends.schedule.layout import contiguous, zigzag
from wf_backends.schedule.mask import CAUSAL, Band, Mask
from wf_backends.schedule.routes import double_ring, make_schedule, ring

walk = import_module("wf_backends.lowering.problem")

A, B, AB = ((0, 4),), ((4, 8),), ((0, 8),)
WANTED = (AB, A, (), AB)
"""Row by row: a pair of readers in a row, nobody, and a reader of everything."""
OWNED = (AB, (), (), ())


def by_step(wanted, owned, kind=WalkerRows, whole=False):
    """By step: (needed, forwarded, partials_forwarded, partials_to_owner)."""
    one, steps = kind(wanted.__getitem__, owned.__getitem__, len(wanted), whole), range(len(wanted))
    return [
        tuple(map(rows, steps))
        for rows in (one.needed, one.forwarded, one.partials_forwarded, one.partials_to_owner)
    ]


def test_a_row_that_nobody_reads_in_a_step_is_nowhere_in_it():
    needed, forwarded, partials_forwarded, partials_to_owner = by_step(WANTED, OWNED)
    assert needed == WANTED
    assert forwarded == ((), (), (), ())  # the owner was the rank before, or nobody read them
    assert partials_forwarded == ((), (), (), ())
    assert partials_to_owner == (AB, A, (), AB)


def test_a_reader_hands_on_what_the_next_one_reads_and_its_partial_result():
    _, forwarded, partials_forwarded, partials_to_owner = by_step((A, AB, A, B), (AB, (), (), ()))
    assert forwarded == ((), (), A, ())
    assert partials_forwarded == ((), A, (), ())
    assert partials_to_owner == (A, B, A, B)


def test_a_rank_takes_its_own_rows_from_itself_and_keeps_what_comes_home():
    _, forwarded, partials_forwarded, partials_to_owner = by_step((AB, AB, AB), ((), A, ()))
    assert forwarded == ((), B, B)
    assert partials_forwarded == (AB, B, ())
    assert partials_to_owner == ((), A, AB)


def test_laps_carry_a_row_by_way_of_ranks_that_do_not_read_it():
    needed, forwarded, partials_forwarded, partials_to_owner = by_step(WANTED, OWNED, RelayedRows)
    assert needed == (AB, AB, AB, AB)
    assert forwarded == ((), (), AB, AB)
    assert partials_forwarded == ((), A, A, ())
    assert partials_to_owner == (AB, (), (), AB)


def test_what_is_kept_for_the_other_pass_is_all_that_any_step_reads():
    needed, forwarded, _, partials_to_owner = by_step((A, (), B), ((), (), ()), whole=True)
    assert needed == (AB, (), B)
    assert forwarded == ((), (), ())
    assert partials_to_owner == (A, (), B)


def test_what_owners_send_is_what_the_rank_before_does_not_hand_on():
    one = WalkerRows((A, AB, A, B).__getitem__, (AB, (), (), ()).__getitem__, 4)
    assert [one.from_owner(step) for step in range(4)] == [A, AB, (), B]


def test_what_is_still_read_shrinks_from_step_to_step():
    assert read_from_step_on((A, (), B, ())) == [AB, B, B, ()]


def test_only_double_rings_have_laps():
    assert double_ring(8, 4).has_laps and double_ring(8, 4).swapped().has_laps
    assert not ring(8).has_laps and not double_ring(8, 8).has_laps


def test_what_is_read_much_later_is_sent_while_something_is_computed():
    """Ranks 0 and 1 share a document, and on a ring of 8 rank 1 is the last to meet rank 0."""
    layout = contiguous(8, 64)
    mask = Mask(CAUSAL, (0, 16, *range(24, 65, 8)))
    steps = lower(Problem(ring(8), layout, layout, mask), 1).steps
    assert [step.num_rows for step in steps] == [8, 0, 0, 0, 0, 0, 0, 8]
    assert [bool(step.owner_in or step.hop_in) for step in steps] == [True] + [False] * 7
    (parcel,) = steps[0].owner_in
    assert (parcel.peer, parcel.num_rows, steps[0].next_num_rows) == (0, 8, 8)


def test_steps_in_which_nothing_happens_are_left_out():
    layout = contiguous(8, 64)
    mask = Mask(CAUSAL, (0, 16, *range(24, 65, 8)))
    plans = [lower(Problem(ring(8), layout, layout, mask), rank) for rank in range(8)]
    assert [plan.busy_steps for plan in plans[:3]] == [
        (0, 1),
        (0, 1, 7),
        (0, 1),
    ]  # 1: gradients home
    assert lower(Problem(ring(8), layout, layout, Mask()), 0).busy_steps == tuple(range(8))


@pytest.mark.parametrize("near", (False, True))
@pytest.mark.parametrize("queries_walk", (False, True))
@pytest.mark.parametrize("name", ("ring", "mesh", "concentric"))
def test_one_rank_of_many_looks_at_its_own_part(monkeypatch, name, queries_walk, near):
    """Pairs of shards that a rank's plan asks about grow with the ranks, not with their square."""
    asked = []

    def counted(*args):
        asked.append(args)
        return seen(*args)

    monkeypatch.setattr(walk, "seen", counted)
    mask = Mask(Band(48, 0)) if near else Mask(CAUSAL)
    numbers = []
    for ranks in (64, 256):
        keys = {"mesh": {"rows": 4, "cols": ranks // 4}, "concentric": {"team_size": 4}}
        schedule = make_schedule({"name": name} | keys.get(name, {}), ranks)
        layout = zigzag(ranks, 32 * ranks)
        asked.clear()
        lower(Problem(schedule, layout, layout, mask, queries_walk), ranks // 2)
        numbers.append(len(asked))
    assert numbers[1] <= 6 * numbers[0]  # not 16
    assert numbers[1] < 24 * 256
