"""The program of the launch tests: it joins the job of a real launcher and writes a JSON report.

mpirun -n 2 python -m tests.launch_program FOLDER [join | join_twice | ...]
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from wf_backends.comm import make_comm
from wf_backends.launch import Launch, init

TIMEOUT_S = 120.0  # on a busy machine four ranks start far apart
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
held_groups: list[Any] = []  # until Python clears the module at its exit


def describe(launch: Launch) -> dict[str, Any]:
    total = torch.tensor(launch.rank)
    dist.all_reduce(total)
    return {
        "launcher": launch.launcher,
        "rank": launch.rank,
        "world_size": launch.world_size,
        "local_rank": launch.local_rank,
        "local_size": launch.local_size,
        "backend": launch.backend,
        "device": str(launch.device),
        "sum of ranks": total.item(),
        "comm": type(make_comm()).__name__,
        "second init is equal": init() == launch,
        "text": str(launch),
        "environ": {name: os.environ.get(name) for name in VARIABLES},
    }


def join() -> None:
    report(describe(init(timeout=TIMEOUT_S)))


def join_twice() -> None:
    """Join, close, and join again without the variables of Open MPI, as under another launcher."""
    before = dict(os.environ)
    first = init(timeout=TIMEOUT_S)
    description = describe(first)
    first.close()
    closed = dict(os.environ) == before and not dist.is_initialized()
    for name in list(os.environ):
        if name.startswith("OMPI_COMM"):
            del os.environ[name]
    second = describe(init(timeout=TIMEOUT_S))
    report(description | {"close undoes init": closed, "without variables": second})


def fail_and_join() -> None:
    """Rank 1 fails while rank 0 waits for it; torchrun restarts both, and they join twice.

    The store of torchrun keeps its keys through the restart.
    """
    if (os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]) == ("0", "1"):
        time.sleep(1)
        sys.exit(3)
    init(timeout=TIMEOUT_S).close()
    report(describe(init(timeout=TIMEOUT_S)))


def report_the_error() -> None:
    try:
        init(timeout=TIMEOUT_S)
    except ValueError as error:
        report({"error": str(error)})


def stay_away() -> None:
    """Rank 1 never joins; the others wait for it in MPI_Init."""
    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        time.sleep(TIMEOUT_S)
    init(timeout=1)


def end_early() -> None:
    """One rank ends before it meets the other one in MPI."""
    from mpi4py import MPI

    error = ""
    if init(timeout=TIMEOUT_S).rank != int(os.environ["ENDS"]):
        try:
            make_comm(MPI.COMM_WORLD, timeout=TIMEOUT_S)
        except RuntimeError as refusal:
            error = str(refusal)
    report({"rank": dist.get_rank(), "error": error})
    if error:
        MPI.COMM_WORLD.Abort(0)  # the meeting can neither end nor be left


def connect_late() -> None:
    """Rank 1 makes the group a second later than rank 0."""
    make_group = dist.init_process_group

    def make_group_late(*args: Any, **kwargs: Any) -> None:
        make_group(*args, **kwargs)
        if dist.get_rank() == 1:
            time.sleep(1.0)
        report({"rank": dist.get_rank(), "made": time.time()})

    dist.init_process_group = make_group_late
    init(timeout=TIMEOUT_S)
    left = time.time()
    made = json.loads(Path(sys.argv[1], f"{os.getpid()}.json").read_text())
    report(made | {"left": left})


def exit_without_close() -> None:
    """Exit while a thread of gloo has a tensor to free, and the program still holds the groups."""
    init(timeout=TIMEOUT_S)
    held_groups.extend((dist.group.WORLD, dist.new_group()))
    for group in held_groups:
        dist.barrier(group)
    report({"rank": dist.get_rank()})
    sys.setswitchinterval(60)  # the running thread keeps the interpreter
    for group in held_groups:
        dist.all_reduce(torch.ones(4), group=group, async_op=True)
    end = time.monotonic() + 1
    while time.monotonic() < end:
        pass


def report(facts: dict[str, Any]) -> None:
    """Write one file per process: launchers mix the lines that their ranks print."""
    Path(sys.argv[1], f"{os.getpid()}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    programs = (join, join_twice, fail_and_join, report_the_error, stay_away)
    programs += (end_early, connect_late, exit_without_close)
    {program.__name__: program for program in programs}[sys.argv[2]]()
