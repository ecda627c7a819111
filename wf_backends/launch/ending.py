"""How a rank ends, so that no peer waits for it for ever.

Under MPI Python ends with MPI's finalize, which waits for all ranks. A rank that ends early would
wait there for peers that wait for its messages. So its connections are closed before, and a rank
that failed ends the job, as `python -m mpi4py` has it. Whatever started it, a rank that failed
waits a moment, so that one of its peers can report who was where.
"""

from __future__ import annotations

import atexit
import gc
import sys
import time
from collections.abc import Callable
from types import CellType
from typing import Any, cast

import torch.distributed as dist

from wf_backends.comm import Board, Note, in_words, job_board

SETTLE_S = 0.05  # for torch's threads at the end of Python
LAST_WORDS_S = 3.0  # for the errors of peers, before a rank that failed ends the job
PAUSE_S = 0.005  # between looks for them
ERROR_LENGTH = 300


def settle_at_exit() -> None:
    """When Python ends, first wait a moment for the threads of groups that nobody destroyed.

    A thread of gloo that frees a tensor while Python ends aborts the process (pytorch issue
    190489). Before that, a job of MPI is left. `init` calls this; call it for groups that were made
    otherwise.
    """
    _at_exit(_settle)
    leave_at_exit()


def leave_at_exit() -> None:
    """When Python ends by an error, or at all in a job of MPI, let go of the peers.

    A rank that failed says why on the job's board and waits a moment for the errors of its peers.
    Under MPI it ends the job. What is registered later runs earlier: call it last.
    """
    _at_exit(_leave)


def _at_exit(step: Callable[[], None]) -> None:
    atexit.unregister(step)  # once is enough
    atexit.register(step)


def failed() -> bool:
    """Whether Python ends by an exception that nobody caught."""
    return getattr(sys, "last_value", None) is not None


def _settle() -> None:
    sys.setswitchinterval(1e-6)  # a thread that waits for the interpreter gets it at once
    time.sleep(SETTLE_S)


def _leave() -> None:
    MPI = sys.modules.get("mpi4py.MPI")
    joined = MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized()
    if MPI is None or not joined or MPI.COMM_WORLD.size == 1:
        MPI = None
    board = job_board() if failed() else None
    rank, size = (dist.get_rank(), dist.get_world_size()) if board else (0, 1)
    if board and size > 1:
        _leave_note(board, rank, sys.last_value)
    if MPI or size > 1:
        _close_connections()
    if board and size > 1:
        sys.stderr.flush()
        _last_words(board, rank, size)
    if MPI and failed():
        time.sleep(SETTLE_S)
        MPI.COMM_WORLD.Abort(1)


def _leave_note(board: Board, rank: int, error: BaseException | None) -> None:
    """Say why this process ends, unless it has said where a wait of it failed."""
    if board.read("fault", rank) is None:
        told = f"{type(error).__name__}: {error}"[:ERROR_LENGTH]
        board.write("fault", rank, {"ended": told})


def _last_words(board: Board, me: int, size: int) -> None:
    """Before this process ends by an error: wait until somebody reports, or all ranks have failed.

    Where no rank waited for a message of ours, the lowest that ends reports, unless all end by the
    same error.

    Args:
        me, size: this rank and the ranks of the job.
    """
    end = time.monotonic() + LAST_WORDS_S
    notes: dict[int, Note] = {}
    while len(notes) < size and time.monotonic() < end and not board.gone:
        if board.reported:
            return
        notes |= {r: n for r in range(size) if r not in notes and (n := board.read("fault", r))}
        time.sleep(PAUSE_S)
    if notes and me == min(notes) and len({note.get("ended") for note in notes.values()}) > 1:
        board.report(in_words(range(size), notes))


def _close_connections() -> None:
    if dist.is_initialized() and "nccl" not in dist.get_backend_config():
        groups = [*dist.distributed_c10d._world.pg_map]
        dist.destroy_process_group()
        _forget(groups)


def _forget(groups: list[Any]) -> None:
    """Close the connections of groups that were destroyed: nothing refers to them any more."""
    while groups:
        group = groups.pop()
        for holder in gc.get_referrers(group):
            _replace(holder, group)
        del group
    gc.collect()


def _replace(holder: Any, group: Any) -> None:
    """None where a dict, a list, a closure's variable or an object holds the group."""
    if isinstance(holder, CellType):
        holder.cell_contents = None
    elif isinstance(holder, list):
        holder[:] = [None if value is group else value for value in cast(list[Any], holder)]
    elif isinstance(holder, dict):
        names = cast(dict[Any, Any], holder)
        names.update({name: None for name, value in names.items() if value is group})
    else:
        for name in (*getattr(holder, "__dict__", ()), *getattr(holder, "__slots__", ())):
            if getattr(holder, name, None) is group:
                object.__setattr__(holder, name, None)  # whether it is frozen or not
