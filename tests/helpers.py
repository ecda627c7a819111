"""Run a function on several ranks: as threads, as gloo processes and under mpirun."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tests import forked
from tests.nccl_queues import Batch, assert_queues_end, record_batches
from wf_backends.comm import Communicator, make_comm, threads

T = TypeVar("T")
ROOT = Path(__file__).parents[1]
MPIRUN = ["mpirun", "--allow-run-as-root", "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]


def run_threads(size: int, fn: Callable[..., T], *args: object, timeout: float = 60.0) -> list[T]:
    """Run `fn(comm, *args)` on `size` ranks as threads, all on one core; the results by rank.

    Also checks that NCCL's queues would end with these messages. On several cores, Python's lock
    goes from core to core at every call of torch: twice the time.
    """
    queues: list[list[Batch]] = [[] for _ in range(size)]

    def run_rank(comm: Communicator, *args: object) -> T:
        torch.set_num_threads(1)
        record_batches(comm, queues[comm.rank])
        return fn(comm, *args)

    with one_core():
        results = threads.run_threads(size, run_rank, *args, timeout=timeout)
    assert_queues_end(queues)
    return results


@contextmanager
def one_core() -> Iterator[None]:
    """Keep this thread and those that it starts on one core, if the system can do that."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")  # other core for each
    os.sched_setaffinity(0, {sorted(cores)[int(worker) % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def run_processes(
    size: int,
    fn: Callable[..., T],
    *args: object,
    timeout: float = 120.0,
    group_timeout: int = 60,
    start: Sequence[str] = (),
) -> list[T]:
    """Run `fn(comm, *args)` on `size` gloo processes; the results by rank.

    Args:
        fn: a function of a module: it is pickled, as are its arguments.
        timeout: seconds for the whole run. group_timeout: seconds for one message.
        start: of the command of a rank, in place of `python()`.

    Raises:
        RuntimeError: with the traceback of each rank that raised, or the exit code of each that
            ended without a result.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "work").write_bytes(pickle.dumps((fn, args)))
        command = [*(start or python()), "-m", "tests.helpers", folder, str(size)]
        processes = [
            subprocess.Popen([*command, str(group_timeout), str(rank)], cwd=ROOT, env=_environ())
            for rank in range(size)
        ]
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and any(p.poll() is None for p in processes):
            time.sleep(0.02)
        exit_codes = [process.poll() for process in processes]
        for process in processes:
            process.kill()
            process.wait()
        return _collect(folder, exit_codes)


def run_mpi(size: int, fn: Callable[..., T], *args: object, timeout: float = 120.0) -> list[T]:
    """Run `fn(mpi4py world communicator, *args)` on `size` ranks under mpirun; the results by rank.

    Raises:
        RuntimeError: with the traceback of each rank that raised, and the output of mpirun.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "work").write_bytes(pickle.dumps((fn, args)))
        command = [*MPIRUN, "-n", str(size), *python(), "-m", "tests.helpers", folder]
        done = run_command(command, timeout=timeout)
        return _collect(folder, [done.returncode] * size, done.stdout)


def python() -> tuple[str, ...]:
    """The `python` of a rank: a fork of a process that has imported torch and the core."""
    return forked.python("tests.helpers", "pytest", "wf_backends.parallel")


def destroy_groups() -> None:
    """Destroy all groups except the world: a thread of each gloo group polls 100 times a second."""
    gc.collect()  # frees objects that hold a group
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def run_command(
    command: Sequence[str], timeout: float = 120.0, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in the root of the repository, one thread per process; stderr is in stdout."""
    return subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        env={**_environ(), **(environ or {})},
        check=False,
    )


def _environ() -> dict[str, str]:
    """The environment of this process, with our packages on the path and one thread per rank."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "integrations")])
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def _gloo_rank(folder: str, size: int, timeout: int, rank: int) -> None:
    torch.set_num_threads(1)
    fn, args = pickle.loads(Path(folder, "work").read_bytes())
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    dist.barrier()  # without it, a rank that ends early breaks the connection of a slow one
    _record(folder, rank, lambda: fn(make_comm(), *args))
    dist.destroy_process_group()


def _mpi_rank(folder: str) -> None:
    from mpi4py import MPI

    torch.set_num_threads(1)
    fn, args = pickle.loads(Path(folder, "work").read_bytes())
    if not _record(folder, MPI.COMM_WORLD.rank, lambda: fn(MPI.COMM_WORLD, *args)):
        MPI.COMM_WORLD.Abort(1)


def _record(folder: str, rank: int, work: Callable[[], object]) -> bool:
    """Write the result of `work` or its traceback to the file of the rank; whether it returned."""
    try:
        outcome = True, work()
    except BaseException:  # what pytest.raises and pytest.fail raise is no Exception
        outcome = False, traceback.format_exc()
    part = Path(folder, f"{rank}.part")
    part.write_bytes(pickle.dumps(outcome))
    part.rename(part.with_suffix(".done"))
    return outcome[0]


def _collect(folder: str, exit_codes: Sequence[int | None], output: str = "") -> list[Any]:
    """The results by rank, from the files that the ranks wrote. Exit code None: it was killed."""
    results, errors = [], []
    for rank, code in enumerate(exit_codes):
        path = Path(folder, f"{rank}.done")
        if not path.exists():
            end = "killed at the timeout" if code is None else f"ended with exit code {code}"
            errors.append(f"rank {rank}: {end}")
            continue
        returned, result = pickle.loads(path.read_bytes())
        if returned:
            results.append(result)
        else:
            errors.append(f"rank {rank}: {result}")
    if errors:
        raise RuntimeError("\n".join([*errors, output]))
    return results


if __name__ == "__main__":
    match sys.argv[1:]:
        case [folder]:
            _mpi_rank(folder)
        case [folder, *numbers]:
            _gloo_rank(folder, *map(int, numbers))
