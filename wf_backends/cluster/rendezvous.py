"""Where the ranks of a job meet before they are a group, and which GPU each of them takes."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from wf_backends.cluster.environment import Place


def open_store(place: Place, world: Any, timeout: float) -> tuple[Place, Store]:
    """The store at which the ranks meet, and where it is."""
    if world is not None:
        return _open_by_mpi(place, world, timeout)
    if place.world_size == 1 and place.address is None:
        store = _listen("127.0.0.1", 0, 1, timeout)
        return replace(place, address="127.0.0.1", port=store.port), store
    if place.address is None or place.port is None:
        raise ValueError(
            f"MASTER_ADDR is not set, and {place.launcher} does not say where rank 0 of "
            f"{place.world_size} is: set MASTER_ADDR and MASTER_PORT on every rank"
        )
    if place.rank == 0 and not place.agent_store:
        return place, _listen(place.address, place.port, place.world_size, timeout)
    return place, _connect(place, timeout)


def _open_by_mpi(place: Place, world: Any, timeout: float) -> tuple[Place, Store]:
    """Rank 0 listens on a port that is free and then tells the others: nobody else can take it."""
    one_host = len(set(world.allgather(socket.gethostname()))) == 1
    store = None
    if place.rank == 0:
        address = "127.0.0.1" if one_host else _outward_address()
        store = _listen(address, 0, place.world_size, timeout)
        place = replace(place, address=address, port=store.port)
    address, port = world.bcast((place.address, place.port))
    place = replace(place, address=address, port=port)
    return place, store or _connect(place, timeout)


def _outward_address() -> str:
    """An address of this host that other hosts reach."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = "127.0.0.1"
    if not address.startswith("127."):
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; only asks which interface leads out
        return probe.getsockname()[0]


def _listen(address: str, port: int, size: int, timeout: float) -> TCPStore:
    wait = timedelta(seconds=timeout)
    return TCPStore(address, port, size, True, wait, wait_for_workers=False)


def _connect(place: Place, timeout: float) -> TCPStore:
    assert place.address is not None and place.port is not None
    wait = timedelta(seconds=timeout)
    try:
        return TCPStore(
            place.address, place.port, place.world_size, False, wait, wait_for_workers=False
        )
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {place.rank} of {place.world_size} ({place.launcher}) did not reach rank 0 at "
            f"{place.address}:{place.port} within {timeout:g} s: {error}"
        ) from error


def meet(store: Store, place: Place, timeout: float) -> tuple[Store, Place]:
    """Wait for all ranks; then the part of the store for this meeting, and the local rank and size.

    Keys of an attempt that torchrun restarted, or of a group that was closed, are never read.
    """
    store = PrefixStore(f"wallfacer/restart {place.restart}", store)
    visit = store.add(f"visits of {place.rank}", 1)
    store = PrefixStore(f"visit {visit}", store)
    store.set(f"host of {place.rank}", socket.gethostname())
    keys = [f"host of {rank}" for rank in range(place.world_size)]
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError as error:
        late = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise RuntimeError(
            f"rank {place.rank} of {place.world_size} ({place.launcher}) waited {timeout:g} s at "
            f"{place.address}:{place.port}: ranks {late} did not come"
        ) from error
    if place.local_rank is None or place.local_size is None:  # all of all is much for thousands
        place = with_local(place, [store.get(key).decode() for key in keys])
    return store, place


def with_local(place: Place, hosts: Sequence[str]) -> Place:
    """The launcher's local rank and size; where it names none, counted over the ranks' hosts."""
    here = [rank for rank, host in enumerate(hosts) if host == hosts[place.rank]]
    return replace(
        place,
        local_rank=here.index(place.rank) if place.local_rank is None else place.local_rank,
        local_size=len(here) if place.local_size is None else place.local_size,
    )


def take_gpu(store: Store, place: Place) -> torch.device:
    """Make one GPU of this host the current device: one for each rank.

    That of the local rank's number, or the one there is where a launcher shows each rank its own
    (srun --gpus-per-task=1). Every rank of the host must call this.

    Raises:
        ValueError: if a rank has no GPU or ranks share one; in the second case on all of the host.
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
    host, here = socket.gethostname(), range((place.local_size or 1) if count == 1 else 0)
    store.set(f"gpu of {host} {local_rank}", str(gpu))
    gpus = [store.get(f"gpu of {host} {rank}") for rank in here]
    if sharing := [rank for rank, gpu in zip(here, gpus, strict=True) if gpus.count(gpu) > 1]:
        raise ValueError(
            f"the local ranks {sharing} share GPUs: show each rank all GPUs of its host, or one of "
            "its own, and start no more ranks than there are GPUs, or use backend='gloo'"
        )
    return torch.device("cuda", index)
