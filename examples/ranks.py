"""What the engines share: batches on their device, a mean over ranks, and checkpoints."""

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
    """The batch with its tensors there; borders of documents stay integers of the host."""
    return {key: x.to(device) if isinstance(x, Tensor) else x for key, x in batch.items()}


def mean_over_ranks(loss: Tensor) -> float:
    """Of a scalar of every rank of the job."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


@contextmanager
def saved(folder: Path, progress: dict[str, int]) -> Iterator[Path]:
    """Where all ranks write a checkpoint of this progress, which is there once all have written."""
    with saved_whole(folder, f"step{progress['step']}") as part:
        yield part
        if dist.get_rank() == 0:
            (part / "progress.json").write_text(json.dumps(progress))


def progress_of(checkpoint: Path) -> dict[str, int]:
    """What `saved` was given."""
    return json.loads((checkpoint / "progress.json").read_text())
