"""Compares the settings of all ranks of a job, before ranks make groups by them."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as short
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from wf_backends import SequenceParallelConfig


def refuse_different(
    settings: SequenceParallelConfig | Mapping[str, Any], group: ProcessGroup | None = None
) -> None:
    """Check that all ranks have the same settings. Every rank must call it.

    Ranks that make groups of other sizes would wait for each other until the timeout.

    Args:
        settings: a config, or values by key, which are compared by their repr.
        group: the ranks that compare. None: the world, or this rank alone without a job.

    Raises:
        ValueError: on every rank, naming each key that differs, and its values by rank; for
            settings that are neither.
    """
    if not isinstance(settings, SequenceParallelConfig | Mapping):
        raise ValueError(f"config must be a SequenceParallelConfig or a dict, got {settings!r}")
    if not dist.is_initialized():
        return
    if isinstance(settings, SequenceParallelConfig):
        settings = settings.to_dict()
    texts = {key: repr(value) for key, value in settings.items()}
    by_rank: list[dict[str, str]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(by_rank, texts, group)
    differences = []
    for key in dict.fromkeys(key for texts in by_rank for key in texts):
        values = [texts.get(key, "not given") for texts in by_rank]
        ranks = {value: [r for r, v in enumerate(values) if v == value] for value in values}
        if len(ranks) > 1:
            shown = ", ".join(f"{value} (ranks {short(where)})" for value, where in ranks.items())
            differences.append(f'"{key}": {shown}')
    if differences:
        raise ValueError(
            f"the ranks do not agree: {'; '.join(differences)}. Give every rank the same settings"
        )
