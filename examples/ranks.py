"""What engines without an answer of their own share: a mean over ranks, and the last checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist
from torch import Tensor


def mean_over_ranks(loss: Tensor) -> float:
    """Of a scalar of every rank of the job."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def note_checkpoint(tag: Path, progress: dict[str, int]) -> None:
    """Make `tag` its folder's last checkpoint, once all ranks have written their part of it."""
    dist.barrier()
    if dist.get_rank() == 0:
        (tag / "progress.json").write_text(json.dumps(progress))
        (tag.parent / "latest").write_text(tag.name)
    dist.barrier()


def last_checkpoint(folder: Path) -> tuple[Path, dict[str, int]]:
    """Where the last one lies, and its progress.

    Raises:
        ValueError: if there is none.
    """
    latest = folder / "latest"
    if not latest.exists():
        raise ValueError(f"--resume: no checkpoint in {folder}")
    tag = folder / latest.read_text()
    return tag, json.loads((tag / "progress.json").read_text())
