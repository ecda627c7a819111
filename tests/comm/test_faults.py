"""Faults: the watch that finds circles of waits, and the report about a failed job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore

from wf_backends.comm import Pass, faults, watch
from wf_backends.comm.faults import (
    LOG_FOLDER,
    Board,
    deferred_termination,
    fault_report,
    note_of,
    report,
)
from wf_backends.comm.protocol import Wait
from wf_backends.comm.watch import Watch

RANKS = range(4)
A, B = Pass(3, "a", "backward"), Pass(2, "b", "backward")


class Clock:
    """A clock that stands still unless the test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic


class WaitingRank:
    """A communicator as its watch sees it: in a pass, waiting for a message of a peer."""

    def __init__(self, rank: int, in_pass: Pass, peer: int, board: Board) -> None:
        self.rank, self.global_ranks = rank, RANKS
        self.running_wait: Wait | None = Wait(
            in_pass, "backward step 0", "message from", peer, 100.0
        )
        self.watch = Watch(self, board)

    def break_off(self, verdict: str) -> None: ...

    def look(self) -> str | None:
        return self.watch.look(self.running_wait, RANKS)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (faults, watch):
        monkeypatch.setattr(module.time, "monotonic", clock.monotonic)
    return clock


def verdicts_after(ranks: list[WaitingRank], clock: Clock, seconds: float) -> list[str | None]:
    """The first verdict of each watch within so many seconds, in which it looks twice a second."""
    verdicts: list[str | None] = [None] * len(ranks)
    for _ in range(int(2 * seconds)):
        clock.now += 0.5
        looks = [rank.look() for rank in ranks]
        verdicts = [first or look for first, look in zip(verdicts, looks, strict=True)]
    return verdicts


def test_a_circle_of_waits_in_different_passes_is_found(clock: Clock) -> None:
    """Rank 0 waits for rank 1 in pass A, rank 1 for rank 0 in pass B; rank 2 waits for rank 1."""
    board = Board(HashStore())
    ranks = [WaitingRank(*wait, board) for wait in ((0, A, 1), (1, B, 0), (2, A, 1))]
    assert verdicts_after(ranks, clock, 4) == [None] * 3
    for verdict in verdicts_after(ranks, clock, 8):
        assert verdict and "layer 'a', backward" in verdict, verdict
        assert "layer 'b', backward" in verdict, verdict


def test_a_circle_of_waits_in_one_pass_is_left_alone(clock: Clock) -> None:
    board = Board(HashStore())
    ranks = [WaitingRank(0, A, 1, board), WaitingRank(1, A, 0, board)]
    assert verdicts_after(ranks, clock, 12) == [None, None]


def test_a_chain_of_waits_for_a_rank_that_computes_is_left_alone(clock: Clock) -> None:
    board = Board(HashStore())
    ranks = [WaitingRank(0, A, 1, board), WaitingRank(1, B, 3, board)]
    assert verdicts_after(ranks, clock, 12) == [None, None]


def test_a_circle_in_which_a_rank_goes_on_is_left_alone(clock: Clock) -> None:
    """Rank 1 waits for another message every second."""
    board = Board(HashStore())
    ranks = [WaitingRank(0, A, 1, board), WaitingRank(1, B, 0, board)]
    for second in range(12):
        ranks[1].running_wait = Wait(B, f"backward step {second}", "message from", 0, 100.0)
        assert verdicts_after(ranks, clock, 1) == [None, None], second


def test_a_circle_that_ends_after_6_seconds_is_left_alone(clock: Clock) -> None:
    board = Board(HashStore())
    ranks = [WaitingRank(0, A, 1, board), WaitingRank(1, B, 0, board)]
    assert verdicts_after(ranks, clock, 6) == [None, None]
    ranks[1].running_wait = None
    assert verdicts_after(ranks, clock, 6) == [None, None]


def test_a_wait_in_a_group_of_which_a_rank_ended_by_an_error_is_ended(clock: Clock) -> None:
    """Its peers need not be that rank, whose connections a fork may keep open."""
    board = Board(HashStore())
    rank = WaitingRank(0, A, 2, board)
    board.write("failed", 0, 7)  # of another group
    assert verdicts_after([rank], clock, 1.5) == [None]
    board.write("failed", 0, 1)
    assert verdicts_after([rank], clock, 0.5) == ["rank 1 has ended and sends nothing more"]


def test_the_note_of_a_wait_that_has_ended_is_taken_down(clock: Clock) -> None:
    """The error of a peer, long afterwards, said that this rank was in that wait."""
    board = Board(HashStore())
    rank = WaitingRank(1, A, 0, board)
    verdicts_after([rank], clock, 4)
    assert board.read("wait", 1)["peer"] == 0
    rank.running_wait = None
    verdicts_after([rank], clock, 1)
    assert board.read("wait", 1) is None


def note(in_pass: Pass, peer: int) -> dict[str, Any]:
    return note_of(Wait(in_pass, "step 0", "message from", peer, 0.0), RANKS)


def test_a_report_says_which_ranks_answered_and_where_each_waits() -> None:
    text = fault_report(RANKS, {0: note(A, 1), 2: note(A, 1), 3: {"ended": "KeyError: 'x'"}})
    assert text.startswith("fault report: ranks [0, 2, 3] answered, ranks [1] did not; ")
    assert "'step 0' (layer 'a', backward of attention call 3): rank 0 for the message from" in text
    assert "rank 2 for the message from rank 1 since " in text
    assert text.endswith("ended: rank 3 by KeyError: 'x'")


# Rank 0 waits for the notes of rank 1; its launcher sends SIGTERM, as after the end of rank 1.
TERMINATED_WHILE_IT_REPORTS = """
import os, signal, threading, time
from torch.distributed import HashStore
from wf_backends.comm import Pass, faults
from wf_backends.comm.protocol import Wait

note = faults.note_of(Wait(Pass(1, "a"), "step 0", "message from", 1, time.monotonic()), range(2))

def terminate():
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=terminate, daemon=True).start()
faults.ANSWER_S = 60
faults.report(faults.Board(HashStore()), range(2), 0, note)
print("it goes on")
"""


def test_a_rank_that_gets_sigterm_reports_before_it_ends() -> None:
    command = [sys.executable, "-c", TERMINATED_WHILE_IT_REPORTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == -signal.SIGTERM and "it goes on" not in done.stdout, done
    assert "ranks [0] answered, ranks [1] did not; 'step 0' (layer 'a'" in done.stderr


def test_a_handler_of_the_program_for_sigterm_stays_in_place() -> None:
    handled = list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, _: handled.append(number))
    try:
        with deferred_termination() as termination:
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert handled == [signal.SIGTERM] and not termination.requested


@pytest.mark.parametrize("rank", [1, 2])
def test_without_rank_0_rank_1_alone_reports(
    monkeypatch: pytest.MonkeyPatch, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(faults, "ANSWER_S", 60)
    store_of_rank_0 = TCPStore("127.0.0.1", 0, is_master=True)
    board = Board(TCPStore("127.0.0.1", store_of_rank_0.port))
    del store_of_rank_0
    report(board, RANKS, rank, note(A, 0))
    reports = [record.getMessage() for record in caplog.records]
    assert len(reports) == (1 if rank == 1 else 0), reports
    for text in reports:
        assert "ranks [1] answered" in text and "Rank 0 has ended" in text


def test_of_two_ranks_that_report_at_the_same_time_one_is_heard(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = HashStore()
    boards = Board(store), Board(store)
    assert not any(board.reported for board in boards)
    for board in boards:
        board.report("fault report: ...")
    assert len(caplog.records) == 1 and all(board.reported for board in boards)


def test_a_log_folder_that_cannot_be_written_does_not_hide_the_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    board = Board(HashStore())
    board.write(LOG_FOLDER, 0, str(tmp_path / "file"))
    board.report("fault report: ...")
    first, second = (record.getMessage() for record in caplog.records)
    assert first == "fault report: ..." and second.startswith("faults.log was not written: ")


def test_a_store_that_does_not_answer_counts_as_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of a rank 0 that is stopped: torch waits for its answer for ever."""

    class StoppedStore:
        def check(self, keys: list[str]) -> bool:
            time.sleep(5)
            return bool(keys)

    board = Board(HashStore())
    monkeypatch.setattr(board, "_store", StoppedStore())
    monkeypatch.setattr(faults, "STORE_S", 0.1)
    start = time.monotonic()
    assert board.read("fault", 1) is None and board.gone
    assert time.monotonic() - start < 3


@pytest.mark.parametrize("seconds", [0, 60])
def test_a_python_that_starts_no_thread_while_it_ends_asks_the_store_itself(seconds: int) -> None:
    """Python 3.12: without this no rank that ends by an error would be heard."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS_WITHOUT_THREADS.format(seconds=seconds)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == (0 if seconds == 0 else 1), done
    assert ("answer" in done.stdout) == (seconds == 0), done
    assert "Exception" not in done.stderr, done


ENDS_WITHOUT_THREADS = """
import atexit, threading, time
from wf_backends.comm import in_time

def refuse(*_):
    raise RuntimeError("can't create new thread at interpreter shutdown")

def call():
    time.sleep({seconds})
    return "answer"

atexit.register(lambda: print(in_time(call, 0.5)))
threading.Thread.start = refuse
"""


def test_in_time_raises_an_error_of_any_kind_at_once() -> None:
    def refuse() -> None:
        raise ValueError("no host")

    start = time.monotonic()
    with pytest.raises(ValueError, match="no host"):
        faults.in_time(refuse, timeout=20.0)
    assert time.monotonic() - start < 10
