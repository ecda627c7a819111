"""How a walker's rows get to their readers: by the rank before, or from their owner."""

from __future__ import annotations

from wf_backends.journeys import journey, still_read
from wf_backends.layout import contiguous
from wf_backends.mask import CAUSAL, Mask
from wf_backends.schedule import double_ring, ring
from wf_backends.walk import Problem, plan_rank

A, B, AB = ((0, 4),), ((4, 8),), ((0, 8),)
WANTED = (AB, A, (), AB)
"""Row by row: a pair of readers in a row, nobody, and a reader of everything."""
OWNED = (AB, (), (), ())


def test_a_row_that_nobody_reads_in_a_step_is_nowhere_in_it():
    one = journey(WANTED, OWNED)
    assert one.held == WANTED
    assert one.handed == ((), (), (), ())  # the owner was the rank before, or nobody read them
    assert one.moved == ((), (), (), ())
    assert one.left == (AB, A, (), AB)


def test_a_reader_hands_on_what_the_next_one_reads_and_its_partial_result():
    one = journey((A, AB, A, B), (AB, (), (), ()))
    assert one.handed == ((), (), A, ())
    assert one.moved == ((), A, (), ())
    assert one.left == (A, B, A, B)


def test_a_rank_takes_its_own_rows_from_itself_and_keeps_what_comes_home():
    one = journey((AB, AB, AB), ((), A, ()))
    assert one.handed == ((), B, B)
    assert one.moved == (AB, B, ())
    assert one.left == ((), A, AB)


def test_laps_carry_a_row_by_way_of_ranks_that_do_not_read_it():
    one = journey(WANTED, OWNED, through=True)
    assert one.held == (AB, AB, AB, AB)
    assert one.handed == ((), (), AB, AB)
    assert one.moved == ((), A, A, ())
    assert one.left == (AB, (), (), AB)


def test_what_is_kept_for_the_other_pass_is_all_that_any_step_reads():
    one = journey((A, (), B), ((), (), ()), whole=True)
    assert one.held == (AB, (), B)
    assert one.handed == ((), (), ())
    assert one.left == (A, (), B)


def test_what_is_still_read_shrinks_from_step_to_step():
    assert still_read((A, (), B, ())) == [AB, B, B, ()]


def test_only_double_rings_have_laps():
    assert double_ring(8, 4).has_laps and double_ring(8, 4).turned().has_laps
    assert not ring(8).has_laps and not double_ring(8, 8).has_laps


def test_what_is_read_much_later_is_sent_while_something_is_computed():
    """Ranks 0 and 1 share a document, and on a ring of 8 rank 1 is the last to meet rank 0."""
    layout = contiguous(8, 64)
    mask = Mask(CAUSAL, (0, 16, *range(24, 65, 8)))
    steps = plan_rank(Problem(ring(8), layout, layout, mask), 1).steps
    assert [step.num_rows for step in steps] == [8, 0, 0, 0, 0, 0, 0, 8]
    assert [bool(step.get or step.take) for step in steps] == [True] + [False] * 7
    (parcel,) = steps[0].get
    assert (parcel.peer, parcel.num_rows, steps[0].more) == (0, 8, 8)


def test_steps_in_which_nothing_happens_are_left_out():
    layout = contiguous(8, 64)
    mask = Mask(CAUSAL, (0, 16, *range(24, 65, 8)))
    plans = [plan_rank(Problem(ring(8), layout, layout, mask), rank) for rank in range(8)]
    assert [plan.busy for plan in plans[:3]] == [(0, 1), (0, 1, 7), (0, 1)]  # 1: gradients home
    assert plan_rank(Problem(ring(8), layout, layout, Mask()), 0).busy == tuple(range(8))
