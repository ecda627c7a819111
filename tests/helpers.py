"""What tests share: a function on several ranks as threads, as processes and under mpirun."""

from __future__ import annotations

import multiprocessing
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
from wf_backends.comm import Communicator, make_comm, threads

T = TypeVar("T")
ROOT = Path(__file__).parents[1]
MPIRUN = ["mpirun", "--allow-run-as-root", "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]


def run_threads(size: int, fn: Callable[..., T], *args: object, timeout: float = 60.0) -> list[T]:
    """Run `fn(comm, *args)` on `size` ranks as threads, all on one core; the results by rank.

    On several cores they would hand Python's lock from one to the other at every call of torch,
    and take twice the time for it.
    """

    def one_thread(comm: Communicator, *args: object) -> T:
        torch.set_num_threads(1)
        return fn(comm, *args)

    with one_core():
        return threads.run_threads(size, one_thread, *args, timeout=timeout)


@contextmanager
def one_core() -> Iterator[None]:
    """This thread and those that it starts stay on one core, where the system has such a thing."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[os.getpid() % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def run_processes(
    size: int,
    fn: Callable[..., T],
    *args: object,
    timeout: float = 120.0,
    group_timeout: float = 60,
) -> list[T]:
    """Run `fn(comm, *args)` on `size` gloo processes; the results by rank.

    Args:
        fn: a function of a module, as are all of its arguments' types: they are pickled.
        timeout: seconds for everything. group_timeout: seconds for one message.

    Raises:
        RuntimeError: with the traceback of each rank that raised, or the exit code of the dead.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tests.helpers"])
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_gloo_rank, args=(folder, rank, size, group_timeout, fn, args))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        exits = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
        return _collect(folder, exits)


def run_mpi(size: int, fn: Callable[..., T], *args: object, timeout: float = 120.0) -> list[T]:
    """Run `fn(mpi4py world communicator, *args)` on `size` ranks under mpirun; the results by rank.

    Raises:
        RuntimeError: with the traceback of each rank that raised, or what mpirun said.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "work").write_bytes(pickle.dumps((fn, args)))
        python = forked.python("tests.helpers")
        command = [*MPIRUN, "-n", str(size), *python, "-m", "tests.helpers", folder]
        done = run_command(command, timeout=timeout)
        return _collect(folder, [done.returncode] * size, done.stdout)


def run_command(
    command: Sequence[str], timeout: float = 120.0, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command from the repository's root, one core per process; stderr goes to stdout."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "integrations")])
    extra = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **(environ or {})}
    return subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        env={**os.environ, **extra},
        check=False,
    )


def _gloo_rank(
    folder: str, rank: int, size: int, timeout: float, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    dist.barrier()  # a rank that ends at once would cut off one that still connects
    _record(folder, rank, lambda: fn(make_comm(), *args))
    dist.destroy_process_group()


def _mpi_rank(folder: str) -> None:
    from mpi4py import MPI

    torch.set_num_threads(1)
    fn, args = pickle.loads(Path(folder, "work").read_bytes())
    if not _record(folder, MPI.COMM_WORLD.rank, lambda: fn(MPI.COMM_WORLD, *args)):
        MPI.COMM_WORLD.Abort(1)


def _record(folder: str, rank: int, work: Callable[[], object]) -> bool:
    """Write what `work` returns, or its traceback; whether it returned."""
    try:
        outcome = True, work()
    except Exception:
        outcome = False, traceback.format_exc()
    part = Path(folder, f"{rank}.part")
    part.write_bytes(pickle.dumps(outcome))
    part.rename(part.with_suffix(".done"))
    return outcome[0]


def _collect(folder: str, exits: Sequence[int | None], output: str = "") -> list[Any]:
    results, troubles = [], []
    for rank, code in enumerate(exits):
        path = Path(folder, f"{rank}.done")
        ok, result = pickle.loads(path.read_bytes()) if path.exists() else (False, _end(code))
        results.append(result)
        troubles += [] if ok else [f"rank {rank}: {result}"]
    if troubles:
        raise RuntimeError("\n".join([*troubles, output]))
    return results


def _end(code: int | None) -> str:
    return "killed at the timeout" if code is None else f"ended with exit code {code}"


if __name__ == "__main__":
    _mpi_rank(sys.argv[1])
