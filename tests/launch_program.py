"""What the launch tests start under real launchers: it joins, and prints what it found as JSON.

mpirun -n 2 python -m tests.launch_program [join | twice | ...]
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from wf_backends.comm import make_comm
from wf_backends.launch import Launch, init

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def facts(launch: Launch) -> dict[str, Any]:
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
        "again": init() == launch,
        "text": str(launch),
        "environ": {name: os.environ.get(name) for name in VARIABLES},
    }


def join() -> None:
    report(facts(init(timeout=30)))


def twice() -> None:
    """Join, leave, and join again in the same processes."""
    before = dict(os.environ)
    first = init(timeout=30)
    first.close()
    left = dict(os.environ) == before and not dist.is_initialized()
    report({**facts(init(timeout=30)), "left": left})


def fail_first() -> None:
    """Rank 1 fails once the group of the first attempt stands; torchrun starts everything again."""
    launch = init(timeout=30)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        dist.barrier()
        sys.exit(3 * launch.rank)
    report(facts(launch))


def refused() -> None:
    try:
        init(timeout=1)
    except ValueError as error:
        report({"error": str(error)})


def hidden() -> None:
    """A launcher that sets no variable we know, but MPI is loaded."""
    for name in [name for name in os.environ if name.startswith(("OMPI_COMM", "PMI_"))]:
        del os.environ[name]
    from mpi4py import MPI

    assert MPI.COMM_WORLD.size == 2
    join()


def report(found: dict[str, Any]) -> None:
    print(f"\n@{json.dumps(found)}\n", end="", flush=True)


if __name__ == "__main__":
    programs = (join, twice, fail_first, refused, hidden)
    {program.__name__: program for program in programs}[sys.argv[1]]()
    if dist.is_initialized():
        dist.destroy_process_group()
