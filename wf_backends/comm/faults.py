"""What the ranks of a job tell each other, through its store, when one of them fails.

A rank whose wait fails, or that ends by an error (`launch/ending.py`), leaves a note. The lowest
rank that waited says in one line what all notes say: who answered, who did not, where each was, and
since when.

A launcher that ends a job sends SIGTERM first: the moment to say where this rank was. Open MPI's
mpirun sends it a quarter of a second after a rank was killed, and SIGKILL soon after it; torchrun
sends it at once, and SIGKILL 30 s later.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from wf_backends.comm.protocol import Communicator, Wait

ANSWER_S = 2.0  # how long a rank that failed waits for the notes of others
PAUSE_S = 0.005  # mpirun kills within 0.02 s of telling
NAMED = 8  # ranks that a report names one by one
FOLDER, REPORT = "log folder", "report"
STORE_GONE = "Rank 0 has ended, and with it the store of the ranks' notes: no other rank is heard"
Note = dict[str, Any]


def note_of(wait: Wait, global_ranks: Sequence[int]) -> Note:
    """A wait for others to read, with the time of day and the peer's rank in the job."""
    waited = time.monotonic() - wait.since
    return {
        "where": wait.where,
        "tag": wait.tag,
        "kind": f"the {wait.kind}",
        "peer": global_ranks[wait.peer],
        "since": time.time() - waited,
        "seconds": waited,
    }


class Board:
    """Notes of the ranks of a job, by kind and global rank. Silent where the store is gone."""

    def __init__(self, store: Store) -> None:
        self._store = PrefixStore("wallfacer/notes", store)
        self.gone = False
        """Whether the store is gone, and with it the notes: rank 0 holds it, unless torchrun."""

    def write(self, kind: str, rank: int, note: object) -> None:
        """Leave a note, in place of an earlier one."""
        self._try(lambda: self._store.set(f"{kind} {rank}", json.dumps(note)))

    def read(self, kind: str, rank: int) -> Any:
        """A rank's note, or None."""
        key = f"{kind} {rank}"
        found = self._try(lambda: self._store.get(key) if self._store.check([key]) else None)
        return None if found is None else json.loads(found)

    @property
    def reported(self) -> bool:
        """Whether a rank has reported."""
        return self.read(REPORT, 0) is not None

    def report(self, line: str) -> None:
        """Say for all ranks what happened: on the board, in this process's log, in the folder."""
        self.write(REPORT, 0, line)
        logging.getLogger(__name__).error("%s", line)
        folder = self.read(FOLDER, 0)
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with Path(folder, "faults.log").open("a") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")

    def _try(self, act: Callable[[], Any]) -> Any:
        try:
            return None if self.gone else act()
        except RuntimeError:
            self.gone = True
            return None


def job_board() -> Board | None:
    """The board of this job; None without torch.distributed."""
    if not dist.is_initialized():
        return None
    return Board(dist.distributed_c10d._get_default_store())


def failure(comm: Communicator, wait: Wait, error: object) -> RuntimeError:
    """The error of a wait that failed; the lowest rank that has one reports it for all.

    Args:
        error: of the library, which names an address at best.
    """
    board, ranks = job_board(), comm.global_ranks
    text = f"{comm.me}: {wait.where}, the {wait.kind} {comm.name_of(wait.peer)} failed: {error}"
    if board is not None and board.read("fault", ranks[comm.rank]) is None:
        own = note_of(wait, ranks)
        board.write("fault", ranks[comm.rank], own)
        report(board, ranks, ranks[comm.rank], own)
        note = board.read("fault", ranks[wait.peer]) or board.read("wait", ranks[wait.peer]) or {}
        if "ended" in note:
            text += f" ({comm.name_of(wait.peer)} ended by {note['ended']})"
        elif note.get("tag", wait.tag) != wait.tag:
            text += f" ({comm.name_of(wait.peer)} is in {note['where']})"
    return RuntimeError(text)


def report(
    board: Board, ranks: Sequence[int], me: int, own: Note, patience: float = ANSWER_S
) -> None:
    """After this rank left its note: report for all, if it is the lowest that waited.

    Args:
        ranks: global ranks, this one among them, of whom notes may be expected.
        own: the note.
        patience: seconds until the others count as not answering.
    """
    end = time.monotonic() + patience
    notes, over = {me: own}, False
    with noticed_termination() as job:
        while len(notes) < len(ranks) and not (over or board.gone):
            if not (over := job.told or time.monotonic() > end):
                time.sleep(PAUSE_S)
            if board.reported:
                return
            for rank in ranks:
                if rank not in notes and (note := board.read("fault", rank)):
                    if rank < me and "where" in note:
                        return
                    notes[rank] = note
        line = in_words(ranks, notes)
        if not board.gone:
            board.report(line)
        elif me == min(rank for rank in ranks if rank):
            board.report(f"{line}. {STORE_GONE}")


def in_words(ranks: Sequence[int], notes: dict[int, Note]) -> str:
    """The report of a fault: one line."""
    silent = [rank for rank in ranks if rank not in notes]
    answered = (
        f"ranks {sorted(notes)} answered, ranks {silent} did not" if silent else "all answered"
    )
    places: dict[str, list[str]] = {}
    for rank, note in sorted(notes.items()):
        if "ended" in note:
            places.setdefault("ended", []).append(f"rank {rank} by {note['ended']}")
            continue
        clock = time.strftime("%H:%M:%S", time.localtime(note["since"]))
        wait = f"rank {rank} for {note['kind']} rank {note['peer']} since {clock}"
        places.setdefault(note["where"], []).append(f"{wait} ({note['seconds']:.1f} s)")
    told = (
        f"{where}: {', '.join(told[:NAMED])}{', ...' * (len(told) > NAMED)}"
        for where, told in places.items()
    )
    return f"fault report: {answered}; {'; '.join(told)}"


class Termination:
    """Whether this process was told to end."""

    told = False

    def __call__(self, *_: object) -> None:
        self.told = True


@contextmanager
def noticed_termination() -> Iterator[Termination]:
    """SIGTERM meanwhile is noticed, and ends the process at the end of the block.

    Only in the main thread, and only where SIGTERM means what it does by default: a program that
    handles it itself keeps it. Blocks inside each other share what they notice.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not signal.SIG_DFL or threading.current_thread() is not threading.main_thread():
        yield handler if isinstance(handler, Termination) else Termination()
        return
    noticed = Termination()
    signal.signal(signal.SIGTERM, noticed)
    try:
        yield noticed
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if noticed.told:
            os.kill(os.getpid(), signal.SIGTERM)
