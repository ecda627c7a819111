"""Communicators: one interface, one file per backend."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from wf_backends.comm.consistency import ConsistencyCheck, fingerprint
from wf_backends.comm.exchanges import (
    all_to_all,
    gather_small,
    gather_texts,
    sum_on_all_ranks,
    sum_over_ranks,
)
from wf_backends.comm.faults import LEFT, LOG_FOLDER, Board, Note, fault_report, in_time, job_board
from wf_backends.comm.mpi import MpiComm
from wf_backends.comm.process_group import GroupComm, as_timeout, end_waits, own_group, timeout_of
from wf_backends.comm.protocol import (
    DEFAULT_TIMEOUT_S,
    NO_PASS,
    Communicator,
    Message,
    Pass,
    Pending,
    Shared,
)
from wf_backends.comm.threads import ThreadComm, World, run_threads

__all__ = [
    "Board",
    "LEFT",
    "LOG_FOLDER",
    "ConsistencyCheck",
    "Communicator",
    "DEFAULT_TIMEOUT_S",
    "Message",
    "NO_PASS",
    "Note",
    "Pass",
    "Pending",
    "Shared",
    "ThreadComm",
    "World",
    "all_to_all",
    "as_timeout",
    "fingerprint",
    "gather_small",
    "gather_texts",
    "end_waits",
    "fault_report",
    "in_time",
    "job_board",
    "make_comm",
    "own_group",
    "run_threads",
    "sum_on_all_ranks",
    "sum_over_ranks",
]


def make_comm(group: Any = None, timeout: float | None = None) -> Communicator:
    """The communicator of a user's group.

    Args:
        group: None = the default group of torch.distributed, or a single rank where that is not
            initialised; a torch ProcessGroup; an mpi4py communicator; or a Communicator, which
            keeps its own timeout.
        timeout: seconds that a wait waits for its peer. None = the timeout of the torch group; for
            an mpi4py communicator that of torch's default group.

    Raises:
        ValueError: if `group` is something else, or does not contain this process.
    """
    if isinstance(group, Communicator):
        return group
    if group is None and not dist.is_initialized():
        return World(1).comm(0)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"group does not hold this process (global rank {dist.get_rank()})")
    if group is None or isinstance(group, dist.ProcessGroup):
        return GroupComm(group, timeout)
    if type(group).__module__.startswith("mpi4py"):
        return MpiComm(group, _default_timeout() if timeout is None else timeout)
    raise ValueError(
        "group must be None, a torch ProcessGroup (of a mesh: get_group()), an mpi4py communicator "
        f"or a Communicator; got {type(group).__module__}.{type(group).__qualname__}: {group!r}"
    )


def _default_timeout() -> float:
    """The timeout of the default group in seconds; `launch.init(timeout=...)` sets it."""
    timeout = timeout_of(dist.group.WORLD) if dist.group.WORLD else None
    return DEFAULT_TIMEOUT_S if timeout is None else timeout.total_seconds()
