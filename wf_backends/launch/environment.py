"""Which launcher started this process, and as which rank, from environment variables.

Pure: standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

DEFAULT_PORT = 29500  # torch's, where MASTER_ADDR is set alone
PORTS = range(1, 2**16)
SLURM_PORTS = range(15000, 30000)  # below the range that systems hand out to clients


@dataclass(frozen=True, slots=True)
class JobProcess:
    """A process of a job, before the ranks meet. None where the environment does not say."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None = None
    local_size: int | None = None
    address: str | None = None
    """Host on which the store of the rendezvous listens."""
    port: int | None = None
    restart: int = 0
    """How often torchrun has restarted the job, as the agent of this host counts."""
    agent_store: bool = False
    """Whether torchrun itself listens at address:port; then rank 0 must not."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """The variables of one launcher. It started this process if the variable `mark` is set."""

    name: str
    mark: str
    rank: str = "RANK"
    sizes: tuple[str, ...] = ("WORLD_SIZE",)
    """The first one that is set counts."""
    local_rank: str = "LOCAL_RANK"
    local_size: str = "LOCAL_WORLD_SIZE"


_OMPI = "OMPI_COMM_WORLD_"
_OPENMPI = _OMPI + "RANK", (_OMPI + "SIZE",), _OMPI + "LOCAL_RANK", _OMPI + "LOCAL_SIZE"
_MPICH = "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", "MPI_LOCALNRANKS"
_SLURM = "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "SLURM_LOCALID"

# The first one whose mark is set counts. Inner launchers come first: torchrun and deepspeed run
# inside the others, and mpirun may start its daemons by srun; Slurm's ranks are then the daemons'.
LAUNCHERS = (
    Launcher("torchrun", "TORCHELASTIC_RUN_ID"),
    Launcher("deepspeed", "CROSS_SIZE", local_size="LOCAL_SIZE"),
    Launcher("openmpi", _OMPI + "SIZE", *_OPENMPI),
    Launcher("mpich", "MPI_LOCALRANKID", *_MPICH),
    Launcher("slurm", "SLURM_PROCID", *_SLURM),
    Launcher("mpich", "PMI_SIZE", *_MPICH),
    Launcher("environment", "WORLD_SIZE"),
    Launcher("environment", "RANK"),
)


def detect(environ: Mapping[str, str]) -> JobProcess:
    """Which launcher started this process, and as which rank.

    Args:
        environ: os.environ, or what a test puts in its place.

    Returns:
        This process. Its launcher is "single", and it is rank 0 of 1, if no launcher is seen,
        and "environment" if RANK and WORLD_SIZE are set but no known launcher is seen.

    Raises:
        ValueError: if a launcher's variables are incomplete or contradict each other.
    """
    launcher = next((known for known in LAUNCHERS if known.mark in environ), None)
    single = JobProcess("single", 0, 1, local_rank=0, local_size=1)
    if launcher is None:
        return single
    rank = _number(environ, launcher, launcher.rank)
    size = _number(environ, launcher, *launcher.sizes)
    if not 0 <= rank < size:
        raise ValueError(
            f"{launcher.rank}={rank} is no rank of a job of {size} ({' or '.join(launcher.sizes)})"
        )
    if launcher.name == "environment" and size == 1:
        return single
    address, port = _store_address(environ, launcher, size)
    return JobProcess(
        launcher.name,
        rank,
        size,
        local_rank=_optional(environ, launcher.local_rank, "LOCAL_RANK"),
        local_size=_optional(environ, launcher.local_size, "LOCAL_WORLD_SIZE"),
        address=address,
        port=port,
        restart=_optional(environ, "TORCHELASTIC_RESTART_COUNT") or 0,
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def with_local(process: JobProcess, hosts: Sequence[str]) -> JobProcess:
    """The process with local rank and size; if no variable gives them, they are counted by host.

    Args:
        hosts: the host name of every rank, by rank.
    """
    ranks_on_host = [rank for rank, host in enumerate(hosts) if host == hosts[process.rank]]
    local_rank, local_size = process.local_rank, process.local_size
    if local_rank is None:
        local_rank = ranks_on_host.index(process.rank)
    if local_size is None:
        local_size = len(ranks_on_host)
    return replace(process, local_rank=local_rank, local_size=local_size)


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: "gpu[03-05,9],login" -> "gpu03"."""
    first = re.split(r",(?![^\[]*\])", nodelist)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def _store_address(
    environ: Mapping[str, str], launcher: Launcher, size: int
) -> tuple[str | None, int | None]:
    """(host, port) of the rendezvous' store; under Slurm by the step's first node and number.

    One rank meets nobody and takes any free port, whatever is set: a step of one task may start
    several programs. Not where torchrun's agent listens, which counts restarts.
    """
    if size == 1 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None, None
    if "MASTER_ADDR" in environ:
        if not environ["MASTER_ADDR"]:
            raise ValueError("MASTER_ADDR is empty: set it to the host of rank 0, or unset it")
        port = _optional(environ, "MASTER_PORT")
        if port is not None and port not in PORTS:
            raise ValueError(f"MASTER_PORT must be a port from 1 to {PORTS[-1]}, got {port}")
        return environ["MASTER_ADDR"], DEFAULT_PORT if port is None else port
    if launcher.name != "slurm":
        return None, None
    nodes = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodelist = next((environ[name] for name in nodes if name in environ), "localhost")
    job = _number(environ, launcher, "SLURM_JOB_ID", "SLURM_JOBID")
    step = _optional(environ, "SLURM_STEP_ID") or 0
    return first_host(nodelist), SLURM_PORTS[(31 * job + step) % len(SLURM_PORTS)]


def _number(environ: Mapping[str, str], launcher: Launcher, *names: str) -> int:
    number = _optional(environ, *names)
    if number is None:
        raise ValueError(
            f"{launcher.mark} is set, so this looks like a job of {launcher.name}, but "
            f"{' or '.join(names)} is missing: set it, or unset {launcher.mark}"
        )
    return number


def _optional(environ: Mapping[str, str], *names: str) -> int | None:
    """The first of these variables that is set, as an integer."""
    name = next((name for name in names if name in environ), None)
    if name is None:
        return None
    try:
        return int(environ[name])
    except ValueError:
        raise ValueError(f"{name} must be an integer, got {environ[name]!r}") from None


def default_log_folder(environ: Mapping[str, str]) -> str | None:
    """Where torchrun keeps the logs of this attempt; None if it did not start this process."""
    error_file = environ.get("TORCHELASTIC_ERROR_FILE")  # attempt_0/3/error.json of local rank 3
    return str(Path(error_file).parents[1]) if error_file else None
