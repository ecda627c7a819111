"""Which waits will not end, and what the report of a fault says."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed import HashStore

from wf_backends.comm import Pass, faults, watch
from wf_backends.comm.faults import Board, in_words, note_of
from wf_backends.comm.protocol import Wait
from wf_backends.comm.watch import Watch

RANKS = range(4)
A, B = Pass(3, "a", "backward"), Pass(2, "b", "backward")


class Clock:
    """Time that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic


class Rank:
    """What a watch sees of a communicator."""

    def __init__(self, rank: int, now: Pass, peer: int, board: Board) -> None:
        self.rank, self.global_ranks = rank, RANKS
        self.waits: Wait | None = Wait(now, "backward step 0", "message from", peer, 100.0)
        self.watch = Watch(self, board)

    def break_off(self, verdict: str) -> None: ...

    def look(self) -> str | None:
        return self.watch.look(self.waits, RANKS)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    for module in (faults, watch):
        monkeypatch.setattr(module.time, "monotonic", found.monotonic)
    return found


def looks(ranks: list[Rank], clock: Clock, seconds: float) -> list[str | None]:
    """What the watches say at the end, looking twice a second."""
    found: list[str | None] = []
    for _ in range(int(2 * seconds)):
        clock.now += 0.5
        found = [rank.look() for rank in ranks]
    return found


def test_a_circle_of_waits_in_different_passes_is_told(clock: Clock) -> None:
    board = Board(HashStore())
    ranks = [Rank(0, A, 1, board), Rank(1, B, 0, board), Rank(2, A, 1, board)]
    assert looks(ranks, clock, 4) == [None] * 3
    for told in looks(ranks, clock, 8):
        assert told and "layer 'a', backward" in told and "layer 'b', backward" in told, told


@pytest.mark.parametrize("case", ["one pass", "no circle", "it moves", "it ended"])
def test_other_waits_go_on(case: str, clock: Clock) -> None:
    board = Board(HashStore())
    ranks = [Rank(0, A, 1, board), Rank(1, A if case == "one pass" else B, 0, board)]
    if case == "no circle":  # rank 3 computes
        ranks[1].waits = Wait(B, "backward step 0", "message from", 3, 100.0)
    for second in range(12):
        if case == "it moves":
            ranks[1].waits = Wait(B, f"backward step {second}", "message from", 0, 100.0)
        if case == "it ended" and second == 6:
            ranks[1].waits = None
        assert looks(ranks, clock, 1) == [None, None], second


def note(now: Pass, peer: int) -> dict[str, Any]:
    return note_of(Wait(now, "step 0", "message from", peer, 0.0), RANKS)


def test_a_report_says_who_answered_where_each_was_and_since_when() -> None:
    told = in_words(RANKS, {0: note(A, 1), 2: note(A, 1), 3: {"ended": "KeyError: 'x'"}})
    assert told.startswith("fault report: ranks [0, 2, 3] answered, ranks [1] did not; ")
    assert "'step 0' (layer 'a', backward of attention call 3): rank 0 for the message from" in told
    assert "rank 2 for the message from rank 1 since " in told
    assert told.endswith("ended: rank 3 by KeyError: 'x'")
