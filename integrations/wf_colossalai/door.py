"""One JSON file, one call: the plugin that the file names, and the model spread for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from torch import nn

from wf_backends import SequenceParallel
from wf_backends._validation import nearest
from wf_colossalai.apply import apply
from wf_colossalai.config import load, sequence_parallel_words
from wf_colossalai.plugin import WallFacerPlugin

HYBRID = "hybrid"
OTHERS: Mapping[str, Any] = MappingProxyType(
    {
        "torch_ddp": TorchDDPPlugin,
        "low_level_zero": LowLevelZeroPlugin,
        "gemini": GeminiPlugin,
    }
)


@dataclass(frozen=True, slots=True)
class Opened:
    """What `from_config` made."""

    plugin: Any
    """For `Booster(plugin=...)`."""
    sp: SequenceParallel
    config: Mapping[str, Any]
    """The whole file: "optimizer" and "gradient_accumulation_steps" are for the training loop."""
    data_parallel_rank: int
    data_parallel_size: int


def from_config(path: str | Path, model: nn.Module) -> Opened:
    """The plugin that "colossalai.plugin" names ("hybrid" unless given), and `model` for it.

    Every other key under "colossalai" is an argument of that plugin.

    Raises:
        ValueError: for an unknown or wrong key, by its name.
    """
    config = load(path)
    options = dict(config.get("colossalai", {}))
    name, words = options.pop("plugin", HYBRID), sequence_parallel_words(config)
    if name == HYBRID:
        plugin = WallFacerPlugin(**words, **options)
        group = plugin.dp_group
        return Opened(plugin, plugin.sp, config, dist.get_rank(group), group.size())
    if name not in OTHERS:
        known = (HYBRID, *OTHERS)
        raise ValueError(
            f'{path}: "colossalai.plugin" must be one of {", ".join(known)}, got {name!r}'
            f"{nearest(name, known)}"
        )
    done = apply(model, words)
    rank, size = done.data_parallel_rank, done.data_parallel_size
    return Opened(OTHERS[name](**options), done.sp, config, rank, size)
