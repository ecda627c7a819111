"""The store at which the ranks of a job meet before they form a group, and each rank's GPU.

torch's own "env://" opens such a store too, but waits for all ranks meanwhile, so that it cannot
name the ranks that are missing. And it does not know MPI.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from wf_backends.comm import gather_texts, in_time, make_comm
from wf_backends.launch.environment import Place

ATTEMPT, MET = "attempt", "met"  # keys: the name of rank 0's attempt, and who came to it
LOOK_S = 1.0  # after which a rank looks whether rank 0 has begun another attempt
GRACE_S = 5.0  # in which a wait with a timeout ends by itself
POLL_S = 0.2  # between two looks whether rank 0 listens
CONNECT_S = 10.0  # after which a connection is tried anew: hosts that boot lose its packets
CONNECTS = 4  # a TCPStore that reaches nobody takes up to 3.5 of its timeouts + 1.5 s


def open_store(place: Place, world: Any, timeout: float) -> tuple[Place, Store]:
    """The store at which the ranks meet, and the place with its address and port.

    Args:
        world: the MPI communicator by which rank 0 sends the address; None = it is in `place`.
    """
    if world is not None:
        return _open_by_mpi(place, world, timeout)
    if place.world_size == 1 and place.address is None:
        place = replace(place, address="127.0.0.1", port=0)
    if place.address is None or place.port is None:
        raise ValueError(
            f"MASTER_ADDR is not set, and {place.launcher} does not say where rank 0 of "
            f"{place.world_size} is: set MASTER_ADDR and MASTER_PORT on every rank"
        )
    return _open(place, timeout)


def _open_by_mpi(place: Place, world: Any, timeout: float) -> tuple[Place, Store]:
    """Rank 0 listens on a free port and then sends it, so that no process can take it before."""
    comm = make_comm(world, timeout)
    is_one_host = len(set(gather_texts(comm, socket.gethostname()))) == 1
    store, address_and_port = None, ""
    if place.rank == 0:
        address = "127.0.0.1" if is_one_host else _outward_address()
        place, store = _open(replace(place, address=address, port=0), timeout)
        address_and_port = f"{place.address} {place.port}"
    address, port = gather_texts(comm, address_and_port)[0].split()
    if store is not None:
        return place, store
    return _open(replace(place, address=address, port=int(port)), timeout)


def _open(place: Place, timeout: float) -> tuple[Place, TCPStore]:
    """Listen as rank 0, at a free port if the port is 0; connect as any other rank."""
    assert place.address is not None and place.port is not None
    address, port, size = place.address, place.port, place.world_size
    listens = place.rank == 0 and not place.agent_store
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
            f"rank {place.rank} of {size} ({place.launcher}) {problem} {address}:{port} within "
            f"{timeout:g} s: {_unknown_name(address) or error}"
        ) from error
    store.set_timeout(timedelta(seconds=timeout))
    return replace(place, port=store.port), store


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


def meet(store: Store, place: Place, timeout: float) -> tuple[Store, Place]:
    """Wait for all ranks. Returns the part of the store for this group, and the completed place.

    Keys of an earlier attempt under torchrun, or of a group that was closed, are never taken for
    those of this one. torchrun's own count of restarts may differ between hosts: it counts only
    failures of the host's own ranks. The place gets the largest, or the starts that rank 0 counts.

    Raises:
        RuntimeError: if ranks do not join within the timeout, naming them.
        ValueError: on all ranks, if their places have different world sizes.
    """
    keys = [f"host of {rank}" for rank in range(place.world_size)]
    me = f"rank {place.rank} of {place.world_size} ({place.launcher})"
    store = PrefixStore("wallfacer", store)
    join = _call_ranks if place.rank == 0 else _join_rank_0
    try:
        store = in_time(lambda: join(store, place, keys, timeout), timeout + GRACE_S)
    except dist.DistStoreError as error:
        late = _late_ranks(store, keys)
        hint = "; in a batch script, start python through srun" if place.launcher == "slurm" else ""
        raise RuntimeError(
            f"{me} waited {timeout:g} s at {place.address}:{place.port}: ranks {late} did not "
            f"come{hint}"
        ) from error
    except RuntimeError as error:
        raise RuntimeError(
            f"{me} waited for all ranks, and rank 0, which holds the store at "
            f"{place.address}:{place.port}, has ended: {error}"
        ) from error
    restart, smallest, largest = map(int, store.get(MET).decode().split()[:3])
    if smallest != largest:
        raise ValueError(
            f"{me}: other ranks have another WORLD_SIZE, it is {smallest} to {largest}: set the "
            "same on all ranks"
        )
    place = replace(place, restart=restart)
    if place.local_rank is None or place.local_size is None:  # reads P keys on each of P ranks
        place = with_local(place, [store.get(key).decode().split(" ", 3)[3] for key in keys])
    return store, place


def _late_ranks(store: Store, keys: list[str]) -> list[int]:
    """The ranks that have not come; [0] if none is missing, or rank 0 has ended with its store."""
    try:
        part = _part(store, store.get(ATTEMPT).decode()) if store.check([ATTEMPT]) else None
        return [rank for rank, key in enumerate(keys) if part and not part.check([key])] or [0]
    except RuntimeError:
        return [0]


def _part(store: Store, attempt: str) -> Store:
    return PrefixStore(f"attempt {attempt}", store)


def _arrival(place: Place, process: str, restart: int) -> str:
    """What a process writes as its rank's key: its name and restart, the job's size, its host."""
    return f"{process} {restart} {place.world_size} {socket.gethostname()}"


def _call_ranks(store: Store, place: Place, keys: list[str], timeout: float) -> Store:
    """As rank 0: name a new attempt, and confirm the processes that come to it."""
    attempt = uuid4().hex
    part = _part(store, attempt)
    is_first = store.add(f"meetings of {socket.gethostname()} {os.getpid()}", 1) == 1
    starts = store.add("starts", int(is_first))  # of rank 0 under this agent of torchrun
    part.set(keys[0], _arrival(place, attempt, max(place.restart, starts - 1)))
    store.set(ATTEMPT, attempt)
    part.wait(keys, timedelta(seconds=timeout))
    came = [part.get(key).decode().split(" ", 3) for key in keys]
    restart, sizes = max(int(arrival[1]) for arrival in came), [int(arrival[2]) for arrival in came]
    part.set(MET, " ".join([f"{restart} {min(sizes)} {max(sizes)}", *(name for name, *_ in came)]))
    return part


def _join_rank_0(store: Store, place: Place, keys: list[str], timeout: float) -> Store:
    """As another rank: come to rank 0's attempt, until one has confirmed this very process.

    The name found first may be left from an attempt that has ended.
    """
    process, end = uuid4().hex, time.monotonic() + timeout
    store.wait([ATTEMPT], timedelta(seconds=timeout))
    while True:
        part = _part(store, store.get(ATTEMPT).decode())
        part.set(keys[place.rank], _arrival(place, process, place.restart))
        try:
            part.wait([MET], timedelta(seconds=LOOK_S))
            if process in part.get(MET).decode().split():
                return part
            time.sleep(LOOK_S)
        except dist.DistStoreError:
            pass
        if time.monotonic() > end:
            raise dist.DistStoreError("rank 0 did not confirm this process")


def with_local(place: Place, hosts: Sequence[str]) -> Place:
    """The place with local rank and size; if no variable gives them, they are counted by host.

    Args:
        hosts: the host name of every rank, by rank.
    """
    ranks_on_host = [rank for rank, host in enumerate(hosts) if host == hosts[place.rank]]
    local_rank, local_size = place.local_rank, place.local_size
    if local_rank is None:
        local_rank = ranks_on_host.index(place.rank)
    if local_size is None:
        local_size = len(ranks_on_host)
    return replace(place, local_rank=local_rank, local_size=local_size)


def take_gpu(store: Store, place: Place) -> torch.device:
    """Make one GPU of this host the current device, a different one for each rank.

    It is the GPU with the number of the local rank, or the only visible GPU if the launcher shows
    each rank its own (srun --gpus-per-task=1). Every rank of the host must call this.

    Raises:
        ValueError: if a rank has no GPU, or on all ranks of the host if some ranks share one.
    """
    count, local_rank = torch.cuda.device_count(), place.local_rank
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
    local_ranks = range(place.local_size or 1) if count == 1 else ()  # who may share that GPU
    gpus = [store.get(f"gpu of {host} {rank}") for rank in local_ranks]
    sharing = [rank for rank, gpu in zip(local_ranks, gpus, strict=True) if gpus.count(gpu) > 1]
    if sharing:
        raise ValueError(
            f"the local ranks {sharing} share GPUs: show each rank all GPUs of its host, or one of "
            "its own, and start no more ranks than there are GPUs, or use backend='gloo'"
        )
    return torch.device("cuda", index)
