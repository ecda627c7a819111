"""What the launch tests start under real launchers: it joins, and writes what it found as JSON.

mpirun -n 2 python -m tests.launch_program FOLDER [join | twice | ...]
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

PATIENCE = 120.0  # seconds; a busy machine starts four ranks far apart
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
held: list[Any] = []  # until Python takes this module apart


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
    report(facts(init(timeout=PATIENCE)))


def twice() -> None:
    """Join, leave, and join again from a launcher that sets no variable we know."""
    before = dict(os.environ)
    first = init(timeout=PATIENCE)
    found = facts(first)
    first.close()
    left = dict(os.environ) == before and not dist.is_initialized()
    for name in [name for name in os.environ if name.startswith("OMPI_COMM")]:
        del os.environ[name]
    report(found | {"left": left, "hidden": facts(init(timeout=PATIENCE))})


def fail_first() -> None:
    """Rank 1 fails while rank 0 waits for it; torchrun starts both again, and they join twice.

    torchrun's store outlives all that, with its keys.
    """
    if (os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]) == ("0", "1"):
        time.sleep(1)
        sys.exit(3)
    init(timeout=PATIENCE).close()
    report(facts(init(timeout=PATIENCE)))


def refused() -> None:
    try:
        init(timeout=1)
    except ValueError as error:
        report({"error": str(error)})


def leave() -> None:
    """End while a thread of gloo still has a tensor to free, in groups that somebody holds."""
    init(timeout=PATIENCE)
    held.extend((dist.group.WORLD, dist.new_group()))
    for group in held:
        dist.barrier(group)
    report({"rank": dist.get_rank()})
    sys.setswitchinterval(60)  # who runs keeps the interpreter
    for group in held:
        dist.all_reduce(torch.ones(4), group=group, async_op=True)
    end = time.monotonic() + 1
    while time.monotonic() < end:
        pass


def report(found: dict[str, Any]) -> None:
    """A file of its own per process: launchers mix the lines that their ranks print."""
    Path(sys.argv[1], f"{os.getpid()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    programs = (join, twice, fail_first, refused, leave)
    {program.__name__: program for program in programs}[sys.argv[2]]()
