"""What a user calls: `apply` for ColossalAI's other plugins, `from_config` for a JSON file."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.shardformer.layer.parallel_module import ParallelModule
from torch import nn
from torch.distributed import ProcessGroup

from wf_backends import SequenceParallelConfig, dsp
from wf_backends._validation import nearest
from wf_backends.comm import own_group
from wf_colossalai.attach import attach, attach_whole
from wf_colossalai.config import HYBRID, load, sequence_parallel_config
from wf_colossalai.plugin import WallFacerPlugin
from wf_colossalai.sequence import PlainSequenceParallel
from wf_colossalai.table import TABLE, AttentionModule
from wf_transformers import (
    AUTOCHUNK,
    MODEL_KEYS,
    Handle,
    ModelOptions,
    attach_compared,
    data_parallel,
    refuse_different,
)
from wf_transformers.whole_batches.custom_loss import forward_of

OTHER_PLUGINS: Mapping[str, Any] = MappingProxyType(
    {"torch_ddp": TorchDDPPlugin, "low_level_zero": LowLevelZeroPlugin, "gemini": GeminiPlugin}
)
REPLACED_FORWARDS = "colossalai.shardformer.modeling"
"""The package of the forwards by which HybridParallelPlugin replaces a model's own."""


def apply(
    model: nn.Module,
    config: SequenceParallelConfig | Mapping[str, Any],
    group: ProcessGroup | None = None,
    table: Mapping[str, AttentionModule] = TABLE,
) -> Handle:
    """Split the sequences of `model` over ranks, before `booster.boost(model, ...)` wraps it.

        handle = wf_colossalai.apply(model, {"sequence_parallel_size": 4, "route": "ring"})
        booster = Booster(plugin=GeminiPlugin(...))
        model, optimizer, *_ = booster.boost(model, optimizer)
        loader = handle.prepare_dataloader(dataset, batch_size=1)

    For TorchDDPPlugin, LowLevelZeroPlugin and GeminiPlugin. They average gradients over the whole
    world, and the model's loss is scaled for that. Call the boosted model with whole batches.

    Args:
        model: a model whose attention is in `table`. It is changed in place.
        config: a SequenceParallelConfig, or a dict of its keys. The dict may also have
            "activation_checkpointing": {"offload": true}, "verify": true, false or "strict", and
            "dsp", whose keys are those of `wf_backends.dsp.stages.Stages`. With "dsp" the model
            needs the modules that it names, and no attention from `table`.
        group: the ranks over which the plugin averages gradients. None: the world. It is cut into
            blocks of sequence_parallel_size consecutive ranks.
        table: the known attention modules.

    Raises:
        ValueError: for a wrong key or value, an unknown model, or a sequence_parallel_size that
            does not divide the group.
        NotImplementedError: for "autochunk"; at the model's first call for a plugin that has split
            the model or replaced its forward.
    """
    stages, model_options = None, ModelOptions()
    refuse_different(config, group)
    if not isinstance(config, SequenceParallelConfig):
        if AUTOCHUNK in config:
            raise NotImplementedError(
                f'"{AUTOCHUNK}" is for WallFacerPlugin: GeminiPlugin exchanges parameters under '
                "every operator, and tiles would miss it"
            )
        block, model_options = ModelOptions.split(config)
        config, stages = dsp.read_block(block, MODEL_KEYS)
    sp = PlainSequenceParallel(config, own_group(config.timeout) if group is None else group)
    if stages is None:
        attach_model = partial(attach, model, sp, table)
    else:
        attach_model = partial(attach_whole, model, sp, stages, model_options.verify)
    compares = stages is None  # with DSP the first forward compares
    handle = attach_compared(
        model_options, model, sp, attach_model, whole_batches=True, compares=compares
    )
    _refuse_split_models(model, handle)
    handle.data_parallel_rank, handle.data_parallel_size = data_parallel(sp, group)
    return handle


def _refuse_split_models(model: nn.Module, handle: Handle) -> None:
    """In the model's first call, refuse weights that a plugin has split, since the ranks of a
    sequence have other tokens, and forwards that it has replaced."""

    def refuse(*_: Any) -> None:
        for name, module in model.named_modules():
            forward: Any = forward_of(module) if "forward" in vars(module) else None
            if str(getattr(forward, "__module__", "")).startswith(REPLACED_FORWARDS):
                raise NotImplementedError(
                    f"the plugin has replaced the forward of {name or type(module).__name__} by "
                    f"ColossalAI's {forward.__qualname__}, past wf_colossalai.apply, which is for "
                    "TorchDDPPlugin, LowLevelZeroPlugin and GeminiPlugin: use WallFacerPlugin"
                )
            is_parallel = isinstance(module, ParallelModule)
            group = getattr(module, "process_group", None) if is_parallel else None
            if group is not None and group.size() > 1:
                raise NotImplementedError(
                    f"tp_size={group.size()} of the plugin has split {name}, and "
                    "wf_colossalai.apply supports no tensor parallelism: set tp_size=1, or use "
                    "WallFacerPlugin(tp_size=...)"
                )
        hook.remove()

    hook = handle.before(model, refuse, first=True)


class PluginHandle(Handle):
    """The handle of a model, with the plugin that a JSON file names.

    Attributes:
        plugin: for `Booster(plugin=...)`.
        config: the whole file; the training loop reads "optimizer" and
            "gradient_accumulation_steps" from it.
    """

    def __init__(self, attached: Handle, plugin: Any, config: Mapping[str, Any]) -> None:
        vars(self).update(vars(attached))  # they share one undo stack
        self.plugin, self.config = plugin, config


def from_config(path: str | Path, model: nn.Module) -> PluginHandle:
    """Make the plugin that "colossalai.plugin" names (default "hybrid"), and attach `model` for it.

    All other keys under "colossalai" are arguments of that plugin.

    Raises:
        ValueError: names an unknown key, or a key with a wrong value.
    """
    config = load(path)
    options = dict(config.get("colossalai", {}))
    name, block = options.pop("plugin", HYBRID), sequence_parallel_config(config)
    if name == HYBRID:
        plugin = WallFacerPlugin(**block, **options)
        return PluginHandle(plugin.handle, plugin, config)
    if not isinstance(name, str) or name not in OTHER_PLUGINS:
        known = (HYBRID, *OTHER_PLUGINS)
        raise ValueError(
            f'{path}: "colossalai.plugin" must be one of {", ".join(known)}, got {name!r}'
            f"{nearest(name, known)}"
        )
    make_plugin = OTHER_PLUGINS[name]
    known = tuple(inspect.signature(make_plugin).parameters)
    for key in options:
        if key not in known:
            raise ValueError(
                f'{path}: "colossalai.{key}" is no argument of {make_plugin.__name__}'
                f"{nearest(key, known)} (known: {', '.join(known)})"
            )
    return PluginHandle(apply(model, block), make_plugin(**options), config)
