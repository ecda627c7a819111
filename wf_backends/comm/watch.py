"""A watch that detects a deadlock of ranks in different passes, long before the timeout.

A thread of each rank notes long waits on the job's board and follows who waits for whom. If ranks
wait in a circle that stays, and are in different passes, then a rank skipped a call or runs
backwards in another order: the thread ends the wait by an error. And if a rank has ended by an
error: its connections stay open as long as a fork of it lives, such as a worker of a DataLoader.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from threading import Thread
from weakref import ref

from wf_backends.comm.faults import Board, Note, failure, job_board, note_of
from wf_backends.comm.protocol import Communicator, Wait

LOOK_S = 0.5  # between two looks
LONG_WAIT_S = 2.0  # a wait of this length is written on the board
SILENT_LOOKS = 5  # if a note stays the same for so many looks, its wait has ended
STUCK_LOOKS = 12  # a circle that stays longer will not end; no message takes so long


class ProcessComm(Communicator):
    """A communicator of processes: waits can be watched, and their errors say where they failed."""

    running_wait: Wait | None = None
    verdict = ""
    """Why the watch ends the running wait."""

    def start_watch(self) -> None:
        """Start to detect waits that will never end, if the job has a board."""
        board = job_board() if self.size > 1 else None
        if board is not None:
            Watch(self, board).start()

    def break_off(self, verdict: str) -> None:
        """End the running wait by an error with this text, when it checks its peer next."""
        self.verdict = verdict

    def failed(self, label: str, transfer: str, peer: int, error: object) -> RuntimeError:
        """The library's error with the ranks and the label, which it does not name."""
        wait = self.running_wait or Wait(self.current_pass, label, transfer, peer, time.monotonic())
        self.running_wait = None
        self.break_off(self.verdict)  # waits for this rank: their ranks answer, too
        return failure(self, wait, self.verdict or error)


class Watch(Thread):
    """A thread that watches the waits of one communicator, as long as the communicator lives."""

    def __init__(self, comm: ProcessComm, board: Board) -> None:
        super().__init__(name="wallfacer watch", daemon=True)
        self._comm, self._board = ref(comm), board
        self._global_rank = comm.global_ranks[comm.rank]
        self._wait: Wait | None = None
        self._num_looks = 0
        """At the running wait. It is in the note, so that others see that this rank still waits."""
        self._circles = deque[dict[int, Note]](maxlen=SILENT_LOOKS)

    def run(self) -> None:
        """Look at the running wait every LOOK_S seconds."""
        while (comm := self._comm()) is not None:
            wait = comm.running_wait
            verdict = self.look(wait, comm.global_ranks)
            if verdict is not None and comm.running_wait is wait:
                comm.break_off(verdict)
                return
            del comm
            time.sleep(LOOK_S)

    def look(self, wait: Wait | None, global_ranks: Sequence[int]) -> str | None:
        """The verdict on a wait that will never end; None for any other wait."""
        seconds = 0.0 if wait is None else time.monotonic() - wait.since
        if seconds > LOOK_S and (failed := self._board.read("failed", 0)) in global_ranks:
            return f"rank {failed} has ended and sends nothing more"
        if wait is None or seconds < LONG_WAIT_S:
            self._circles.clear()
            if self._wait is not None:  # ended: no error may say that this rank is in it
                self._wait = None
                self._board.write("wait", self._global_rank, None)
            return None
        self._num_looks = self._num_looks + 1 if wait is self._wait else 1
        self._wait = wait
        note = note_of(wait, global_ranks) | {"looks": self._num_looks}
        self._board.write("wait", self._global_rank, note)
        self._circles.append(self._circle())
        return self._verdict(self._circles[-1])

    def _verdict(self, circle: dict[int, Note]) -> str | None:
        """The verdict on the latest circle, if it stays and its ranks are in different passes."""
        if not circle or not all(self._is_stuck(rank, note) for rank, note in circle.items()):
            return None
        if len({note["tag"] for note in circle.values()}) == 1:
            return None
        waits = "; ".join(
            f"rank {rank} in {note['where']} for {note['transfer']} rank {note['peer']}"
            for rank, note in circle.items()
        )
        return (
            f"ranks wait for each other, in different calls: {waits}. One of them left out a call, "
            "or takes backwards in another order"
        )

    def _circle(self) -> dict[int, Note]:
        """Notes of this rank, of the peer it waits for, and so on; empty if one does not wait."""
        notes: dict[int, Note] = {}
        rank = self._global_rank
        while rank not in notes:
            note = self._board.read("wait", rank)
            if note is None:
                return {}
            notes[rank] = note
            rank = note["peer"]
        return notes

    def _is_stuck(self, rank: int, note: Note) -> bool:
        """Whether a rank has been in this wait for long, and still looked at it lately."""
        earlier = self._circles[0].get(rank, note)
        return note["looks"] > max(earlier["looks"], STUCK_LOOKS)
