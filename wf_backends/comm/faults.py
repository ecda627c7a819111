"""The report of a fault: through the job's store, ranks learn where each of them was.

A rank whose wait fails, or that ends by an error (`launch/ending.py`), leaves a note in the store.
The lowest rank whose wait failed reports all notes in one line: which ranks answered, which did
not, what each rank waited for, and since when.

A launcher that ends a job sends SIGTERM first, and this module reports then. Open MPI's mpirun
sends SIGTERM a quarter of a second after a rank was killed, and SIGKILL soon after it; torchrun
sends SIGTERM at once, and SIGKILL 30 s later.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from wf_backends.comm.protocol import Communicator, Wait

ANSWER_S = 2.0  # how long a rank whose wait failed waits for the notes of others
STORE_S = 3.0  # how long the store may take to answer; if rank 0 is stopped, it never does
PAUSE_S = 0.005  # between looks at the store; mpirun sends SIGKILL 0.02 s after SIGTERM
MAX_NAMED_RANKS = 8  # at one place, in a report
LEFT, LOG_FOLDER, REPORT = "left", "log folder", "report"  # topics of notes
Note = dict[str, Any]
T = TypeVar("T")


def note_of(wait: Wait, global_ranks: Sequence[int]) -> Note:
    """The note of a wait: the peer is a global rank, `since` is the time of day."""
    seconds = time.monotonic() - wait.since
    return {
        "where": wait.where,
        "tag": wait.tag,
        "transfer": f"the {wait.transfer}",
        "peer": global_ranks[wait.peer],
        "since": time.time() - seconds,
        "seconds": seconds,
    }


def in_time(call: Callable[[], T], timeout: float) -> T:
    """What `call` returns or raises, in a thread: Python handles no Ctrl-C while torch waits.

    Python 3.12 starts no thread while it ends: a call that takes too long ends the process then.

    Raises:
        RuntimeError: also if it takes longer than `timeout` seconds.
    """
    answer = Future[T]()

    def run() -> None:
        try:
            answer.set_result(call())
        except Exception as error:
            answer.set_exception(error)

    try:
        threading.Thread(target=run, daemon=True).start()
    except RuntimeError:
        faulthandler.dump_traceback_later(timeout, exit=True, file=2)  # sys.stderr may be no file
        run()
        faulthandler.cancel_dump_traceback_later()
    try:
        return answer.result(timeout)
    except TimeoutError:
        raise RuntimeError("no answer") from None


class Board:
    """The notes of a job's ranks, by topic and global rank. Without the store reads are None."""

    def __init__(self, store: Store) -> None:
        self._store = PrefixStore("wallfacer/notes", store)
        self.gone = False
        """Whether the store does not answer any more. Rank 0 holds it, or torchrun's agent."""

    def write(self, topic: str, rank: int, note: object) -> None:
        """Write a rank's note on a topic, in place of an earlier one."""
        self._try(lambda: self._store.set(f"{topic} {rank}", json.dumps(note)))

    def read(self, topic: str, rank: int) -> Any:
        """A rank's note on a topic, or None."""
        key = f"{topic} {rank}"
        text = self._try(lambda: self._store.get(key) if self._store.check([key]) else None)
        return None if text is None else json.loads(text)

    @property
    def reported(self) -> bool:
        """Whether a rank has reported."""
        return self.read(REPORT, 0) is not None

    def report(self, line: str) -> None:
        """Report for all ranks, unless another does: in the log, on the board and in the folder."""
        if (self._try(lambda: self._store.add("reports", 1)) or 1) > 1:
            return
        logging.getLogger(__name__).error("%s", line)
        self.write(REPORT, 0, line)
        folder = self.read(LOG_FOLDER, 0)
        if folder is None:
            return
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with Path(folder, "faults.log").open("a") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
        except OSError as error:  # a full disk must not hide the fault
            logging.getLogger(__name__).error("faults.log was not written: %s", error)

    def _try(self, access: Callable[[], Any]) -> Any:
        try:
            return None if self.gone else in_time(access, STORE_S)
        except RuntimeError:
            self.gone = True
            return None


def job_board() -> Board | None:
    """The board of this job; None if torch.distributed is not initialised."""
    if not dist.is_initialized():
        return None
    return Board(dist.distributed_c10d._get_default_store())


def failure(comm: Communicator, wait: Wait, error: object) -> RuntimeError:
    """The error of a wait that failed; before it, the lowest rank with such an error reports.

    Args:
        error: the library's, which does not name ranks.
    """
    board, ranks = job_board(), comm.global_ranks
    peer_name = comm.name_of(wait.peer)
    text = f"{comm.me}: {wait.where}, the {wait.transfer} {peer_name} failed: {error}"
    if board is not None and board.read("fault", ranks[comm.rank]) is None:
        own_note = note_of(wait, ranks)
        board.write("fault", ranks[comm.rank], own_note)
        report(board, ranks, ranks[comm.rank], own_note)
        note = board.read("fault", ranks[wait.peer]) or board.read("wait", ranks[wait.peer]) or {}
        if "ended" in note:
            text += f" ({peer_name} ended by {note['ended']})"
        elif note.get("tag", wait.tag) != wait.tag:
            text += f" ({peer_name} is in {note['where']})"
    return RuntimeError(text)


def report(board: Board, ranks: Sequence[int], me: int, own_note: Note) -> None:
    """Collect the notes of all ranks and report them, unless another rank reports.

    The lowest rank whose wait failed reports. This rank's note is on the board already.

    Args:
        ranks: the global ranks whose notes are collected, with this one's, `me`. Those without a
            note after ANSWER_S count as not answering.
    """
    deadline = time.monotonic() + ANSWER_S
    notes, is_last_look = {me: own_note}, False
    with deferred_termination() as termination:
        while len(notes) < len(ranks) and not (is_last_look or board.gone):
            is_last_look = termination.requested or time.monotonic() > deadline
            if not is_last_look:
                time.sleep(PAUSE_S)
            if board.reported:
                return
            for rank in ranks:
                if rank not in notes and (note := board.read("fault", rank)):
                    if rank < me and "where" in note:
                        return
                    notes[rank] = note
        line = fault_report(ranks, notes)
        if not board.gone:
            board.report(line)
        elif me == min(rank for rank in ranks if rank != 0):
            gone = "Rank 0 has ended or is stopped, and with it the store of the ranks' notes"
            board.report(f"{line}. {gone}: no other rank is heard")


def fault_report(ranks: Sequence[int], notes: dict[int, Note]) -> str:
    """The report of a fault in one line, from the notes by global rank."""
    silent = [rank for rank in ranks if rank not in notes]
    answered = (
        f"ranks {sorted(notes)} answered, ranks {silent} did not" if silent else "all answered"
    )
    ranks_by_place: dict[str, list[str]] = {}
    for rank, note in sorted(notes.items()):
        if "ended" in note:
            ranks_by_place.setdefault("ended", []).append(f"rank {rank} by {note['ended']}")
            continue
        clock = time.strftime("%H:%M:%S", time.localtime(note["since"]))
        wait = f"rank {rank} for {note['transfer']} rank {note['peer']} since {clock}"
        ranks_by_place.setdefault(note["where"], []).append(f"{wait} ({note['seconds']:.1f} s)")
    places: list[str] = []
    for place, texts in ranks_by_place.items():
        more = ", ..." if len(texts) > MAX_NAMED_RANKS else ""
        places.append(f"{place}: {', '.join(texts[:MAX_NAMED_RANKS])}{more}")
    return f"fault report: {answered}; {'; '.join(places)}"


class Termination:
    """A handler of SIGTERM that notes the request to end."""

    requested = False

    def __call__(self, *_: object) -> None:
        self.requested = True


@contextmanager
def deferred_termination() -> Iterator[Termination]:
    """Inside the block SIGTERM is only noted; it ends the process at the end of the block.

    Only in the main thread, and only where SIGTERM has its default handler: a program's own handler
    stays. Nested blocks share one `Termination`.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not signal.SIG_DFL or threading.current_thread() is not threading.main_thread():
        yield handler if isinstance(handler, Termination) else Termination()
        return
    termination = Termination()
    signal.signal(signal.SIGTERM, termination)
    try:
        yield termination
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if termination.requested:
            os.kill(os.getpid(), signal.SIGTERM)
