"""Helpers that the engines share: move a batch, average over ranks, write checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wf_backends.checkpoints import saved_whole


def to_device(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The batch with its tensors on `device`; "cu_seqlens" stays a tuple of Python ints."""
    return {key: x.to(device) if isinstance(x, Tensor) else x for key, x in batch.items()}


def mean_over_ranks(loss: Tensor) -> float:
    """The mean of a scalar over all ranks of the job."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


@contextmanager
def write_checkpoint(folder: Path, progress: dict[str, int]) -> Iterator[Path]:
    """Yields the folder into which every rank writes; on leaving it becomes folder/step<N>.

    A job that is killed meanwhile leaves no incomplete checkpoint under that name.
    """
    with saved_whole(folder, f"step{progress['step']}") as path:
        yield path
        if dist.get_rank() == 0:
            (path / "progress.json").write_text(json.dumps(progress))


def read_progress(checkpoint: Path) -> dict[str, int]:
    """The `progress` that `write_checkpoint` stored."""
    return json.loads((checkpoint / "progress.json").read_text())
