"""Ranks that wait for each other in a circle, each in another call, would wait until the timeout.

A thread of each rank says on the job's board where a long wait is, and looks whether the ranks
that are waited for wait themselves, back to this one. Where they have done so for a while, and not
all in the same pass, one of them left out a call or takes backwards in another order: the wait is
broken.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from threading import Thread
from weakref import ref

from wf_backends.comm.faults import Board, Note, failure, job_board, note_of
from wf_backends.comm.protocol import Communicator, Wait

LOOK_S = 0.5  # between two looks
NOTE_S = 2.0  # a wait that is noted
SILENT_LOOKS = 5  # a wait whose note is the same for as many has ended
STUCK_LOOKS = 12  # a circle that stays for more will not end: longer than bytes are on their way


class ProcessComm(Communicator):
    """A communicator of processes: its waits are watched, and tell where they failed."""

    verdict = ""
    """Why the running wait is broken off."""
    waits: Wait | None = None
    _watch: Watch | None = None

    def watch(self) -> None:
        """See Communicator.watch."""
        board = job_board() if self.size > 1 else None
        if board is not None and self._watch is None:
            self._watch = Watch(self, board)
            self._watch.start()

    @abstractmethod
    def break_off(self, verdict: str) -> None:
        """End the running wait by an error that says so."""

    def failed(self, label: str, kind: str, peer: int, error: object) -> RuntimeError:
        """An error of the library, which names an address at best, with ranks and label."""
        wait, self.waits = self.waits, None
        wait = wait or Wait(self.now, label, kind, peer, time.monotonic())
        return failure(self, wait, self.verdict or error)


class Watch(Thread):
    """Watches one communicator until it is gone."""

    def __init__(self, comm: ProcessComm, board: Board) -> None:
        super().__init__(name="wallfacer watch", daemon=True)
        self._comm, self._board, self._me = ref(comm), board, comm.global_ranks[comm.rank]
        self._wait: Wait | None = None
        self._beat = 0
        """Looks at the running wait; others see by it that this rank is alive."""
        self._circles = deque[dict[int, Note]](maxlen=SILENT_LOOKS)

    def run(self) -> None:
        """Look, again and again."""
        while (comm := self._comm()) is not None:
            wait = comm.waits
            verdict = self.look(wait, comm.global_ranks)
            if verdict is not None and comm.waits is wait:
                comm.break_off(verdict)
                return
            del comm
            time.sleep(LOOK_S)

    def look(self, wait: Wait | None, global_ranks: Sequence[int]) -> str | None:
        """What to say of a wait that will not end; None of any other."""
        if wait is None or time.monotonic() - wait.since < NOTE_S:
            self._circles.clear()
            return None
        self._wait, self._beat = wait, 1 + (self._beat if wait is self._wait else 0)
        self._board.write("wait", self._me, note_of(wait, global_ranks) | {"beat": self._beat})
        circle = self._circle()
        self._circles.append(circle)
        stuck = circle and all(self._stays(rank, note) for rank, note in circle.items())
        if not stuck or len({note["tag"] for note in circle.values()}) == 1:
            return None
        told = "; ".join(
            f"rank {rank} in {note['where']} for {note['kind']} rank {note['peer']}"
            for rank, note in circle.items()
        )
        return (
            f"ranks wait for each other, in different calls: {told}. One of them left out a call, "
            "or takes backwards in another order"
        )

    def _circle(self) -> dict[int, Note]:
        """The notes of who is waited for, one after another from this rank on; empty if one does
        not wait."""
        found: dict[int, Note] = {}
        rank = self._me
        while rank not in found:
            note = self._board.read("wait", rank)
            if note is None:
                return {}
            found[rank], rank = note, note["peer"]
        return found

    def _stays(self, rank: int, note: Note) -> bool:
        """Whether a rank has been in this wait for long, and still is."""
        earlier = self._circles[0].get(rank, note)
        return note["beat"] > max(earlier["beat"], STUCK_LOOKS)
