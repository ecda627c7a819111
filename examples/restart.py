"""Resuming after a fault: from which checkpoint, and with which configuration."""

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
        ValueError: if the checkpoint of `--resume` does not exist or is incomplete.
    """
    folder = Path(args.resume) if args.resume else args.out / "checkpoints"
    if args.resume is not None or args.resume_tag is not None:
        return find_checkpoint(folder, args.resume_tag)
    return find_checkpoint(folder) if job.restart and complete(folder) else None


def config_for_ranks(config: str, out: Path) -> str:
    """Path of a configuration that fits the number of ranks; `config` itself if it fits.

    Otherwise sequence_parallel_size becomes the largest smaller number that divides the ranks; a
    route that this size does not allow becomes a ring. Rank 0 writes the new file into `out`.
    """
    settings = json.loads(Path(config).read_text())
    world_size = dist.get_world_size()
    block = settings.get("wallfacer", settings)
    size = block.get("sequence_parallel_size", 1)
    if world_size % size == 0:
        return config
    size = max(n for n in range(1, min(size, world_size) + 1) if world_size % n == 0)
    block |= _changes_for_size(block, size)
    path = out / f"config_of_{world_size}_ranks.json"
    if dist.get_rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(settings, indent=2))
        route = block.get("route", "auto")
        message = f"{world_size} ranks: sequence_parallel_size {size}, route {route} ({path})"
        print(message, flush=True)
    dist.barrier()
    return str(path)


def _changes_for_size(block: dict[str, Any], size: int) -> dict[str, Any]:
    """The keys of a "wallfacer" block that change for this sequence_parallel_size."""
    fields = SequenceParallelConfig.__dataclass_fields__
    options = {key: value for key, value in block.items() if key in fields}
    try:
        SequenceParallelConfig.from_dict(options | {"sequence_parallel_size": size})
    except ValueError:
        return {"sequence_parallel_size": size, "route": "ring", "ulysses_degree": 1}
    return {"sequence_parallel_size": size}
