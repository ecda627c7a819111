"""What a rank does when Python ends, so that no peer waits for it for ever.

Under MPI, Python ends with MPI_Finalize, which waits for all ranks. A rank that ends early would
wait there for peers that wait for its messages. So its connections are closed first, and a rank
that failed aborts the job, as under `python -m mpi4py`. With any launcher a rank that failed waits
a moment, so that one of its peers can report where each rank was.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable
from multiprocessing import active_children
from typing import Any

import torch.distributed as dist

from wf_backends.comm import LEFT, Board, Note, end_waits, fault_report, job_board

SETTLE_S = 0.05  # for torch's threads at the end of Python
PEER_ERRORS_S = 3.0  # that a failed rank waits for its peers' errors before it ends
POLL_S = 0.005
MAX_ERROR_LENGTH = 300  # characters


def settle_at_exit() -> None:
    """When Python ends, wait a moment for the threads of groups that were not destroyed.

    A thread of gloo that frees a tensor while Python ends aborts the process (pytorch issue
    190489). Includes `leave_at_exit`, which then runs first. `init` calls this; call it for groups
    that were made otherwise.
    """
    _at_exit(_settle)
    leave_at_exit()


def leave_at_exit() -> None:
    """When Python ends by an error, or in any way under MPI, release the peers that wait.

    A rank that failed writes its error on the job's board and waits a moment for the errors of its
    peers. Under MPI it aborts the job. Functions registered later run earlier: call this last.
    """
    _at_exit(_leave)


def _at_exit(function: Callable[[], None]) -> None:
    atexit.unregister(function)  # so that it runs once
    atexit.register(function)


def failed() -> bool:
    """Whether Python ends by an uncaught exception."""
    return getattr(sys, "last_value", None) is not None


def mpi_of_job() -> Any:
    """The module mpi4py.MPI if the program has joined several ranks by it, else None."""
    MPI: Any = sys.modules.get("mpi4py.MPI")
    is_joined = MPI and MPI.Is_initialized() and not MPI.Is_finalized()
    return MPI if is_joined and MPI.COMM_WORLD.size > 1 else None


def _settle() -> None:
    sys.setswitchinterval(1e-6)  # a thread that waits for the interpreter gets it at once
    time.sleep(SETTLE_S)


def _leave() -> None:
    MPI = mpi_of_job()
    board = job_board() if failed() or MPI else None
    if failed():
        if board and dist.get_world_size() > 1:
            _tell_peers(board, dist.get_rank(), dist.get_world_size())
        if MPI:
            time.sleep(SETTLE_S)
            MPI.COMM_WORLD.Abort(1)
    elif MPI:
        if board:
            board.write(LEFT, 0, dist.get_rank())
        _close_connections()


def _tell_peers(board: Board, rank: int, size: int) -> None:
    """Write this rank's error, end the waits of its peers, and wait for a report of the fault."""
    if board.read("fault", rank) is None:  # else the board has where one of its waits failed
        text = f"{type(sys.last_value).__name__}: {sys.last_value}"[:MAX_ERROR_LENGTH]
        board.write("fault", rank, {"ended": text})
    board.write("failed", 0, rank)
    for child in active_children():
        if child.daemon:  # Python ends it, too, but later; a fork keeps the connections open
            child.terminate()
    _close_connections()
    sys.stderr.flush()
    _report_errors(board, rank, size)


def _report_errors(board: Board, rank: int, size: int) -> None:
    """Wait for a report by another rank, but not if all have failed; if none comes, report.

    The lowest rank that failed reports if the errors differ, or if a rank has told none and this
    one's is a RuntimeError: those of torch's own waits name no rank.

    Args:
        rank, size: this rank and the number of ranks of the job.
    """
    end = time.monotonic() + PEER_ERRORS_S
    notes: dict[int, Note] = {}
    while len(notes) < size and time.monotonic() < end and not board.gone:
        if board.reported:
            return
        for peer in range(size):
            if peer not in notes and (note := board.read("fault", peer)):
                notes[peer] = note
        time.sleep(POLL_S)
    differ = len({note.get("ended") for note in notes.values()}) > 1
    silent_peer = len(notes) < size and isinstance(sys.last_value, RuntimeError)
    if notes and rank == min(notes) and (differ or silent_peer):
        board.report(fault_report(range(size), notes))


def _close_connections() -> None:
    if dist.is_initialized():
        for group in dist.distributed_c10d._world.pg_map:
            end_waits(group)
        if "nccl" not in dist.get_backend_config():
            dist.destroy_process_group()
