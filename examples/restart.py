"""Going on after a fault: from which checkpoint, and on how many ranks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from wf_backends import SequenceParallelConfig
from wf_backends.checkpoints import complete, find_checkpoint, write_whole
from wf_backends.launch import Launch


def checkpoint_to_resume(args: argparse.Namespace, job: Launch) -> Path | None:
    """The checkpoint that `--resume` asks for, or the last one after a restart by torchrun.

    Raises:
        ValueError: if the one that is asked for is not there, or incomplete.
    """
    folder = Path(args.resume) if args.resume else args.out / "checkpoints"
    if args.resume is not None or args.resume_tag is not None:
        return find_checkpoint(folder, args.resume_tag)
    return find_checkpoint(folder) if job.restart and complete(folder) else None


def fitted(config: str, out: Path) -> str:
    """A configuration for as many ranks as there are: the given one, or what it becomes on fewer.

    Takes the largest sequence_parallel_size, up to the given one, that divides the ranks, and the
    given route where it takes this size, else a ring. Rank 0 writes it and says so.
    """
    words, world = json.loads(Path(config).read_text()), dist.get_world_size()
    block = words["wallfacer"] if "wallfacer" in words else words
    size = block.get("sequence_parallel_size", 1)
    if world % size == 0:
        return config
    size = next(n for n in range(min(size, world), 0, -1) if world % n == 0)
    block |= _of_size(block, size)
    path = out / f"config_of_{world}_ranks.json"
    if dist.get_rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(words, indent=2))
        route = block.get("route", "auto")
        print(f"{world} ranks: sequence_parallel_size {size}, route {route} ({path})", flush=True)
    dist.barrier()
    return str(path)


def _of_size(block: dict[str, Any], size: int) -> dict[str, Any]:
    """What changes in a block for this size."""
    known = SequenceParallelConfig.__dataclass_fields__
    words = {key: value for key, value in block.items() if key in known}
    try:
        SequenceParallelConfig.from_dict(words | {"sequence_parallel_size": size})
    except ValueError:
        return {"sequence_parallel_size": size, "route": "ring", "ulysses_degree": 1}
    return {"sequence_parallel_size": size}
