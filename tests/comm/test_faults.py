"""Which waits will not end, and what the report of a fault says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore

from wf_backends.comm import Pass, faults, watch
from wf_backends.comm.faults import Board, deferred_termination, fault_report, note_of, report
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
    told = fault_report(RANKS, {0: note(A, 1), 2: note(A, 1), 3: {"ended": "KeyError: 'x'"}})
    assert told.startswith("fault report: ranks [0, 2, 3] answered, ranks [1] did not; ")
    assert "'step 0' (layer 'a', backward of attention call 3): rank 0 for the message from" in told
    assert "rank 2 for the message from rank 1 since " in told
    assert told.endswith("ended: rank 3 by KeyError: 'x'")


# A rank that waits for the notes of others is told to end by the launcher, as after a kill.
TOLD = """
import os, signal, threading, time
from torch.distributed import HashStore
from wf_backends.comm import Pass, faults
from wf_backends.comm.protocol import Wait

own = faults.note_of(Wait(Pass(1, "a"), "step 0", "message from", 1, time.monotonic()), range(2))
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
faults.report(faults.Board(HashStore()), range(2), 0, own, patience=60)
print("it goes on")
"""


def test_a_rank_that_is_told_to_end_reports_first_and_then_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TOLD], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == -signal.SIGTERM and "it goes on" not in done.stdout, done
    assert "ranks [0] answered, ranks [1] did not; 'step 0' (layer 'a'" in done.stderr


def test_a_program_that_handles_sigterm_itself_keeps_it() -> None:
    seen = list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        with deferred_termination() as noticed:
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM] and not noticed.requested


@pytest.mark.parametrize("rank", [1, 2])
def test_without_rank_0_the_next_rank_reports_what_it_knows(
    rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    of_rank_0 = TCPStore("127.0.0.1", 0, is_master=True)
    board = Board(TCPStore("127.0.0.1", of_rank_0.port))
    del of_rank_0
    report(board, RANKS, rank, note(A, 0), patience=60)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (rank == 1), told
    assert all("ranks [1] answered" in line and "Rank 0 has ended" in line for line in told), told
