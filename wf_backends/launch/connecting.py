"""The ranks that have met make their group: each opens a connection to every other.

gloo alone names no rank that is missing, waits for it five timeouts long, and takes no Ctrl-C
meanwhile. And a rank that ended while others connect would end them by errors of gloo's.

What the ranks write in the store, one after another:

    key                  by                   for      value
    tried RANK           each rank            others   nothing: it has connected, or failed
    connected            each connected rank  them     how many have connected
    end of connecting    the last of these,   all      nothing: all have connected;
                         or one that failed            or its error
    leaving RANK         each rank            rank 0   nothing: it reads the store no more
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from wf_backends.comm import in_time
from wf_backends.launch.environment import JobProcess

END = "end of connecting"  # key
LAST_ERRORS_S = 1.0  # that a rank which failed waits for those of others, to see who is silent
GRACE_S = 5.0  # that a connected rank waits longer than one that still connects


def connect(
    backend: str, store: Store, process: JobProcess, device: torch.device, timeout: float
) -> None:
    """Make the group, and wait until all ranks have, rank 0 until the others leave its store.

    Raises:
        RuntimeError: if a rank does not connect within the timeout, or has ended; names it.
    """
    ranks = range(process.world_size)
    tried, leaving = [f"tried {rank}" for rank in ranks], [f"leaving {rank}" for rank in ranks]

    def wait(keys: list[str]) -> str:
        """The value of the first key, when all are there."""
        longest, limit = timedelta(seconds=timeout + GRACE_S), timeout + 2 * GRACE_S
        return in_time(lambda: store.wait(keys, longest) or store.get(keys[0]), limit).decode()

    try:
        in_time(lambda: _make_group(backend, store, process, device, timeout), timeout + 1)
        store.set(tried[process.rank], "")
        if in_time(lambda: store.add("connected", 1), GRACE_S) == process.world_size:
            store.set(END, "")
        if first_error := wait([END]):
            raise RuntimeError(first_error)
        store.set(leaving[process.rank], "")
        if process.rank == 0:
            wait(leaving)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {process.rank} of {process.world_size} ({process.launcher}) connected to all "
            f"ranks, for up to {timeout:g} s: ranks {_silent(store, tried, process.rank, error)} "
            f"did not, or have ended: {error}"
        ) from error


def _make_group(
    backend: str, store: Store, process: JobProcess, device: torch.device, timeout: float
) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread
    dist.init_process_group(
        backend,
        store=store,
        rank=process.rank,
        world_size=process.world_size,
        timeout=timedelta(seconds=timeout),
        device_id=device if device.type == "cuda" else None,
    )


def _silent(store: Store, tried: list[str], rank: int, error: RuntimeError) -> list[int]:
    """The ranks of which nothing is known after this one has told its error; [0] if its store has
    ended or does not answer."""

    def look() -> list[int]:
        store.set(tried[rank], "")
        store.set(END, str(error))
        time.sleep(LAST_ERRORS_S)
        return [rank for rank, key in enumerate(tried) if not store.check([key])]

    try:
        return in_time(look, LAST_ERRORS_S + GRACE_S)
    except RuntimeError:
        return [0]
