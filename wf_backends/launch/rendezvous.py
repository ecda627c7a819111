"""The store at which the ranks of a job meet before they form a group, and each rank's GPU.

torch's own "env://" opens such a store too, but waits for all ranks meanwhile, so that it cannot
name the ranks that are missing. And it does not know MPI.

What the ranks write in the store, below "wallfacer":

    key                      by              for         value
    meetings of HOST PID     rank 0          itself      how many groups this process has made
    starts                   rank 0          itself      how many processes were rank 0 here
    attempt                  rank 0          others      the name of its newest attempt to meet

and below "attempt NAME", so that what an attempt has left is not taken for the next one's:

    arrival of RANK          each rank       rank 0      its Arrival, with a name of its own
    met                      rank 0          all         all arrivals, once all ranks have come
    gpu of HOST LOCAL_RANK   each with NCCL  its host's  the GPU that it takes

A process whose arrival is not in "met" is too late, or is another one of its rank. What follows is
in launch/connecting.py.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from wf_backends.comm import gather_texts, in_time, make_comm
from wf_backends.launch.environment import JobProcess, with_local

ATTEMPT, MET = "attempt", "met"  # keys
LOOK_S = 1.0  # after which a rank looks whether rank 0 has begun another attempt
GRACE_S = 5.0  # in which a wait with a timeout ends by itself
POLL_S = 0.2  # between two looks whether rank 0 listens
CONNECT_S = 10.0  # after which a connection is tried anew: hosts that boot lose its packets
CONNECTS = 4  # a TCPStore that reaches nobody takes up to 3.5 of its timeouts + 1.5 s


def open_store(process: JobProcess, world: Any, timeout: float) -> tuple[JobProcess, Store]:
    """The store at which the ranks meet, and the process with its address and port.

    Args:
        world: the MPI communicator by which rank 0 sends the address; None = it is in `process`.
    """
    if world is not None:
        return _open_by_mpi(process, world, timeout)
    if process.world_size == 1 and process.address is None:
        process = replace(process, address="127.0.0.1", port=0)
    if process.address is None or process.port is None:
        raise ValueError(
            f"MASTER_ADDR is not set, and {process.launcher} does not say where rank 0 of "
            f"{process.world_size} is: set MASTER_ADDR and MASTER_PORT on every rank"
        )
    return _open(process, timeout)


def _open_by_mpi(process: JobProcess, world: Any, timeout: float) -> tuple[JobProcess, Store]:
    """Rank 0 listens on a free port and then sends it, so that no process can take it before."""
    comm = make_comm(world, timeout)
    is_one_host = len(set(gather_texts(comm, socket.gethostname()))) == 1
    store, address_and_port = None, ""
    if process.rank == 0:
        address = "127.0.0.1" if is_one_host else _outward_address()
        process, store = _open(replace(process, address=address, port=0), timeout)
        address_and_port = f"{process.address} {process.port}"
    address, port = gather_texts(comm, address_and_port)[0].split()
    if store is not None:
        return process, store
    return _open(replace(process, address=address, port=int(port)), timeout)


def _open(process: JobProcess, timeout: float) -> tuple[JobProcess, TCPStore]:
    """Listen as rank 0, at a free port if the port is 0; connect as any other rank."""
    assert process.address is not None and process.port is not None
    address, port, size = process.address, process.port, process.world_size
    listens = process.rank == 0 and not process.agent_store
    wait = timedelta(seconds=timeout / CONNECTS)
    try:
        if not listens:
            _await_port(address, port, timeout)
        store = in_time(  # a thread that is in TCPStore when Python ends aborts the process
            lambda: TCPStore(address, port, size, listens, wait, wait_for_workers=False), timeout
        )
    except (OSError, UnicodeError, RuntimeError) as error:
        problem = "could not listen at" if listens else "did not reach rank 0 at"
        raise RuntimeError(
            f"rank {process.rank} of {size} ({process.launcher}) {problem} {address}:{port} within "
            f"{timeout:g} s: {_unknown_name(address) or error}"
        ) from error
    store.set_timeout(timedelta(seconds=timeout))
    return replace(process, port=store.port), store


def _await_port(address: str, port: int, timeout: float) -> None:
    """Wait until a program listens there. OSError, UnicodeError: why none was reached in time."""
    end = time.monotonic() + timeout
    while True:
        left = end - time.monotonic()
        wait = min(max(left, POLL_S), CONNECT_S)
        try:
            return socket.create_connection((address, port), wait).close()
        except (OSError, UnicodeError):
            if left < 2 * POLL_S:
                raise
        time.sleep(POLL_S)


def _unknown_name(address: str) -> str:
    """Why this host knows no address of that name; empty if it knows one."""
    try:
        socket.getaddrinfo(address, None)
    except (OSError, UnicodeError) as error:  # UnicodeError: a name with an impossible length
        return f"{socket.gethostname()} knows no host {address!r} ({error})"
    return ""


def _outward_address() -> str:
    """An address of this host that other hosts can reach; its name if no route leads out of it."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = "127.0.0.1"
    if not address.startswith("127."):
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; it only selects the outward interface
        except OSError:
            return socket.gethostname()
        return probe.getsockname()[0]


class Arrival(NamedTuple):
    """A process that has come to an attempt."""

    name: str
    """No other process, or later attempt of this one, has it."""
    restart: int
    world_size: int
    host: str


def meet(store: Store, process: JobProcess, timeout: float) -> tuple[Store, JobProcess]:
    """Wait for all ranks. Returns the part of the store for this group, and the process, completed.

    Keys of an earlier attempt under torchrun, or of a group that was closed, are never taken for
    those of this one. torchrun's own count of restarts may differ between hosts: it counts only
    failures of the host's own ranks. The largest is taken, or the starts that rank 0 counts.

    Raises:
        RuntimeError: if ranks do not join within the timeout, naming them.
        ValueError: on all ranks, if their world sizes differ; if two processes are the same rank.
    """
    keys = [f"arrival of {rank}" for rank in range(process.world_size)]
    me = f"rank {process.rank} of {process.world_size} ({process.launcher})"
    store = PrefixStore("wallfacer", store)
    join = _call_ranks if process.rank == 0 else _join_rank_0
    try:
        part = in_time(lambda: join(store, process, keys, timeout), timeout + GRACE_S)
        met = in_time(lambda: part.get(MET), GRACE_S)
    except dist.DistStoreError as error:
        late = _late_ranks(store, keys)
        on_slurm = process.launcher == "slurm"
        hint = "; in a batch script, start python through srun" if on_slurm else ""
        raise RuntimeError(
            f"{me} waited {timeout:g} s at {process.address}:{process.port}: ranks {late} did not "
            f"come{hint}"
        ) from error
    except RuntimeError as error:
        raise RuntimeError(
            f"{me} waited for all ranks, and rank 0, which holds the store at "
            f"{process.address}:{process.port}, has ended or is stopped: {error}"
        ) from error
    arrivals = [Arrival(*values) for values in json.loads(met)]
    sizes = {arrival.world_size for arrival in arrivals}
    if len(sizes) > 1:
        raise ValueError(
            f"{me}: other ranks have another WORLD_SIZE, it is {min(sizes)} to {max(sizes)}: set "
            "the same on all ranks"
        )
    process = with_local(process, [arrival.host for arrival in arrivals])
    return part, replace(process, restart=max(arrival.restart for arrival in arrivals))


def _late_ranks(store: Store, keys: list[str]) -> list[int]:
    """The ranks that have not come; [0] if none is missing, or rank 0 has ended or is stopped."""

    def look() -> list[int]:
        if not store.check([ATTEMPT]):
            return [0]
        part = _part(store, store.get(ATTEMPT).decode())
        return [rank for rank, key in enumerate(keys) if not part.check([key])] or [0]

    try:
        return in_time(look, GRACE_S)
    except RuntimeError:
        return [0]


def _part(store: Store, attempt: str) -> Store:
    return PrefixStore(f"attempt {attempt}", store)


def _arrival(process: JobProcess, name: str, restart: int) -> str:
    return json.dumps(Arrival(name, restart, process.world_size, socket.gethostname()))


def _call_ranks(store: Store, process: JobProcess, keys: list[str], timeout: float) -> Store:
    """As rank 0: name a new attempt, and confirm the processes that come to it."""
    attempt = uuid4().hex
    part = _part(store, attempt)
    is_first = store.add(f"meetings of {socket.gethostname()} {os.getpid()}", 1) == 1
    starts = store.add("starts", int(is_first))  # of rank 0 under this agent of torchrun
    part.set(keys[0], _arrival(process, attempt, max(process.restart, starts - 1)))
    store.set(ATTEMPT, attempt)
    part.wait(keys, timedelta(seconds=timeout))
    part.set(MET, json.dumps([json.loads(part.get(key)) for key in keys]))
    return part


def _join_rank_0(store: Store, process: JobProcess, keys: list[str], timeout: float) -> Store:
    """As another rank: come to rank 0's attempt, until one has confirmed this very process.

    The attempt found first may be left from a group that has ended.
    """
    arrival, key = _arrival(process, uuid4().hex, process.restart), keys[process.rank]
    end, last_attempt = time.monotonic() + timeout, None
    taken = ValueError(
        f"another process came to {process.address}:{process.port} as rank {process.rank}, too: "
        "give each process a RANK of its own, and each job a MASTER_PORT of its own"
    )
    store.wait([ATTEMPT], timedelta(seconds=timeout))
    while True:
        attempt = store.get(ATTEMPT).decode()
        part = _part(store, attempt)
        if attempt == last_attempt and part.get(key) != arrival.encode():
            raise taken
        part.set(key, arrival)
        if _is_confirmed(part, arrival):
            return part
        if time.monotonic() > end:
            is_left_over = process.agent_store or not part.check([MET])
            raise dist.DistStoreError("rank 0 did not confirm it") if is_left_over else taken
        last_attempt = attempt


def _is_confirmed(part: Store, arrival: str) -> bool:
    """Whether rank 0 has confirmed an arrival; waits LOOK_S if it has not yet."""
    try:
        part.wait([MET], timedelta(seconds=LOOK_S))
    except dist.DistStoreError:
        return False
    is_confirmed = arrival in part.get(MET).decode()
    if not is_confirmed:
        time.sleep(LOOK_S)  # other processes have met: rank 0 may begin another attempt
    return is_confirmed


def take_gpu(store: Store, process: JobProcess) -> torch.device:
    """Make one GPU of this host the current device, a different one for each rank.

    It is the GPU with the number of the local rank, or the only visible GPU if the launcher shows
    each rank its own (srun --gpus-per-task=1). Every rank of the host must call this.

    Raises:
        ValueError: if a rank has no GPU, or on all ranks of the host if some ranks share one.
    """
    count, local_rank = torch.cuda.device_count(), process.local_rank
    index = 0 if count == 1 else local_rank
    if index is None or index >= count:
        raise ValueError(
            f"local rank {local_rank} has no GPU of its own, this host has {count}: start at most "
            f"{count} ranks a host, or use backend='gloo'"
        )
    torch.cuda.set_device(index)
    gpu = getattr(torch.cuda.get_device_properties(index), "uuid", index)
    host = socket.gethostname()
    store.set(f"gpu of {host} {local_rank}", str(gpu))
    local_ranks = range(process.local_size or 1) if count == 1 else ()  # who may share that GPU
    gpus = [store.get(f"gpu of {host} {rank}") for rank in local_ranks]
    sharing = [rank for rank, gpu in zip(local_ranks, gpus, strict=True) if gpus.count(gpu) > 1]
    if sharing:
        raise ValueError(
            f"the local ranks {sharing} share GPUs: show each rank all GPUs of its host, or one of "
            "its own, and start no more ranks than there are GPUs, or use backend='gloo'"
        )
    return torch.device("cuda", index)
