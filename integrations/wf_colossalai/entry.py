"""What a user calls: `apply` where a plugin spreads no sequences, `from_config` for a JSON file."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from torch import nn
from torch.distributed import ProcessGroup

from wf_backends import SequenceParallelConfig, dsp
from wf_backends._validation import nearest
from wf_backends.comm import own_group
from wf_colossalai.attach import attach, attach_whole
from wf_colossalai.config import HYBRID, load, sequence_parallel_words
from wf_colossalai.plugin import WallFacerPlugin
from wf_colossalai.sequence import PlainSequenceParallel
from wf_colossalai.table import TABLE, AttentionModule
from wf_transformers import AUTOCHUNK, Handle, ModelWords, attach_compared, data_parallel

OTHERS: Mapping[str, Any] = MappingProxyType(
    {"torch_ddp": TorchDDPPlugin, "low_level_zero": LowLevelZeroPlugin, "gemini": GeminiPlugin}
)


def apply(
    model: nn.Module,
    config: SequenceParallelConfig | Mapping[str, Any],
    group: ProcessGroup | None = None,
    table: Mapping[str, AttentionModule] = TABLE,
) -> Handle:
    """Spread the sequences of `model`, before `booster.boost(model, ...)` wraps it.

        handle = wf_colossalai.apply(model, {"sequence_parallel_size": 4, "route": "ring"})
        booster = Booster(plugin=GeminiPlugin(...))
        model, optimizer, *_ = booster.boost(model, optimizer)
        loader = handle.prepare_dataloader(dataset, batch_size=1)

    For TorchDDPPlugin, LowLevelZeroPlugin and GeminiPlugin. They average gradients over the whole
    world, and the model's loss counts on it. Call the boosted model with whole batches.

    Args:
        model: a model whose attention is in `table`. It is changed in place.
        config: the configuration or its words; with "dsp" among them (the words of
            `wf_backends.dsp.stages.Stages`) any model whose modules they name, `table` aside. Also
            "activation_checkpointing": {"offload": true} and "verify": true, false or "strict".
        group: the ranks that the plugin averages gradients over. None: the world. It is cut into
            blocks of sequence_parallel_size consecutive ranks.
        table: the attention modules that are known.

    Raises:
        ValueError: for a wrong word, an unknown model, or a size that does not divide the group.
    """
    stages, run = None, ModelWords()
    if not isinstance(config, SequenceParallelConfig):
        if AUTOCHUNK in config:
            raise NotImplementedError(
                f'"{AUTOCHUNK}" is for WallFacerPlugin: GeminiPlugin exchanges parameters under '
                "every operator, and tiles would miss it"
            )
        words, run = ModelWords.split(config)
        config, stages = dsp.read_words(words)
    sp = PlainSequenceParallel(config, own_group(config.timeout) if group is None else group)
    make = (
        partial(attach, model, sp, table)
        if stages is None
        else partial(attach_whole, model, sp, stages, run.verify)
    )
    plain = stages is None  # else it is compared in its first forward
    handle, _ = attach_compared(run, model, sp, make, whole_batches=True, compares=plain)
    handle.data_parallel_rank, handle.data_parallel_size = data_parallel(sp, group)
    return handle


class PluginHandle(Handle):
    """The handle of a model whose plugin a JSON file names.

    Attributes:
        plugin: for `Booster(plugin=...)`.
        config: the whole file: "optimizer" and "gradient_accumulation_steps" are for the training
            loop.
    """

    def __init__(self, attached: Handle, plugin: Any, config: Mapping[str, Any]) -> None:
        vars(self).update(vars(attached))  # what either takes back, both have taken back
        self.plugin, self.config = plugin, config


def from_config(path: str | Path, model: nn.Module) -> PluginHandle:
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
        return PluginHandle(plugin.handle, plugin, config)
    if name not in OTHERS:
        known = (HYBRID, *OTHERS)
        raise ValueError(
            f'{path}: "colossalai.plugin" must be one of {", ".join(known)}, got {name!r}'
            f"{nearest(name, known)}"
        )
    return PluginHandle(apply(model, words), OTHERS[name](**options), config)
