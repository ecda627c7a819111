"""A shardformer policy: ColossalAI's own for the model, with WallFacer's sequence parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from colossalai.shardformer import ShardConfig
from colossalai.shardformer.policies.auto_policy import get_autopolicy
from colossalai.shardformer.policies.base_policy import ModulePolicyDescription, Policy
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_colossalai.attach import attach
from wf_colossalai.sequence import PlainSequenceParallel
from wf_colossalai.table import TABLE, AttentionModule, find
from wf_transformers import MODEL_KEYS, Handle, ModelOptions, attach_by, verify

SUPPORTED_MODES = ("ring_attn", "all_to_all")


class WallFacerPolicy(Policy):
    """ColossalAI does tensor and pipeline parallelism, WallFacer does sequence parallelism.

    ColossalAI's policy for the model sees a shard config without sequence parallelism, so that it
    replaces no attention. The class attribute `table` has the known attention modules.

    Args:
        config: a SequenceParallelConfig, or a dict of its keys, which may also have
            "activation_checkpointing" and "verify". sequence_parallel_size may be left out (it is
            the plugin's sp_size). None: the configuration of the WallFacerPlugin.
        native: the policy for tensor and pipeline parallelism. None: ColossalAI's own policy for
            the model's class, if it has one.
    """

    table: Mapping[str, AttentionModule] = TABLE
    shard_config: Any
    model: Any

    def __init__(
        self,
        config: SequenceParallelConfig | Mapping[str, Any] | None = None,
        native: Policy | None = None,
    ) -> None:
        super().__init__()
        self.native: Any = native
        self._config = config
        self.of_plugin: tuple[Handle, ModelOptions] | None = None
        """The handle and the model options of the WallFacerPlugin that uses this policy."""
        self.handle: Handle | None = None
        """The handle of the boosted model."""

    def set_model(self, model: nn.Module) -> None:
        """Find the model's attention in the table, and ColossalAI's policy for the model."""
        super().set_model(model)
        row = find(model, self.table)
        if self.native is None:
            self.native = _native_policy(model)
        self.native.set_model(model)
        self.native.is_causal = row.causal

    def config_sanity_check(self) -> None:
        """Refuse settings that would give wrong results."""
        config, stages = self.shard_config, self.pipeline_stage_manager
        if config.sequence_parallelism_mode not in SUPPORTED_MODES:
            raise ValueError(
                f"sequence_parallelism_mode must be one of {list(SUPPORTED_MODES)} with a "
                f"WallFacer policy (with enable_sequence_parallelism=True), got "
                f"{config.sequence_parallelism_mode!r}"
            )
        if stages is not None and stages.use_zbv:
            raise NotImplementedError(
                'pp_style="zbv", ColossalAI\'s zero-bubble schedule, is not supported (it hangs): '
                'use "1f1b" or "interleaved"'
            )
        has_policy = not isinstance(self.native, _NoPolicy)
        if stages is not None and not (has_policy and isinstance(self.model, PreTrainedModel)):
            raise NotImplementedError(
                f"pipeline parallelism of {type(self.model).__name__} is not supported (set "
                "pp_size=1); it is for transformers' models that ColossalAI has a policy for"
            )
        if config.enable_tensor_parallelism and not has_policy:
            raise NotImplementedError(
                f"ColossalAI has no policy for {type(self.model).__name__}: set tp_size=1"
            )
        if config.enable_tensor_parallelism and _has_alibi(self.model):
            raise NotImplementedError(
                f"tensor parallelism of ALiBi ({type(self.model).__name__}) is not supported: a "
                "rank's heads would get the slopes of others; set tp_size=1"
            )

    def set_shard_config(self, shard_config: ShardConfig) -> None:
        super().set_shard_config(shard_config)
        self.native.set_shard_config(
            replace(
                shard_config,
                enable_sequence_parallelism=False,
                sequence_parallelism_mode=None,  # type: ignore[arg-type]
                enable_flash_attention=False,
                enable_all_optimization=False,
            )
        )

    def preprocess(self) -> nn.Module:
        """Compare the model on all ranks with the model on one, while every rank has all of it."""
        self._sp, self._model_options = self._read_config()
        attach_model = partial(attach, self.model, self._sp, self.table)
        attached = partial(self._model_options.attached, self.model, attach_model)
        verify(self.model, self._sp, attached, self._model_options.verify, whole_batches=True)
        return self.native.preprocess()

    def module_policy(self) -> dict[Any, ModulePolicyDescription]:
        """Return ColossalAI's own policy without its forwards of models and of known attention."""
        descriptions = self.native.module_policy()
        for module_class, description in descriptions.items():
            methods = description.method_replacement
            if methods and self._keeps_forward(module_class):
                kept = {name: method for name, method in methods.items() if name != "forward"}
                description.method_replacement = kept
        return descriptions

    def _keeps_forward(self, module_class: type | str) -> bool:
        """Whether modules of this class (or with this class name) keep their own forward."""
        names = {base.__name__ for base in getattr(module_class, "__mro__", ())} | {module_class}
        return bool(names & set(self.table)) or "PreTrainedModel" in names

    def postprocess(self) -> nn.Module:
        self.model = self.native.postprocess()
        config, stages = self.shard_config, self.pipeline_stage_manager
        splits_logits = config.enable_tensor_parallelism and config.parallel_output
        group = config.tensor_parallel_process_group if splits_logits else None
        options = self._model_options
        is_whole = stages is None and not config.enable_tensor_parallelism
        attach_model = partial(attach, self.model, self._sp, self.table, group, stages)
        self.handle = attach_by(options, self.model, self._sp, attach_model, compares=is_whole)
        if self._config is None and self.of_plugin is not None:
            self.of_plugin[0].undo.push(self.handle.undo)
        return self.model

    def _read_config(self) -> tuple[SequenceParallel, ModelOptions]:
        """Return the sequence parallelism and the model options, of `config` or of the plugin."""
        config, size = self._config, self.shard_config.sequence_parallel_size
        if config is None and self.of_plugin is not None:
            return self.of_plugin[0].sp, self.of_plugin[1]
        if isinstance(config, SequenceParallelConfig):
            config = config.to_dict()
        block = {"sequence_parallel_size": size} | dict(config or {})
        block, model_options = ModelOptions.split(block)
        if block["sequence_parallel_size"] != size:
            raise ValueError(
                f"sequence_parallel_size {block['sequence_parallel_size']} of the policy must be "
                f"the plugin's sp_size {size}; leave it out"
            )
        config = SequenceParallelConfig.from_dict(block, MODEL_KEYS)
        sp = PlainSequenceParallel(config, self.shard_config.sequence_parallel_process_group)
        return sp, model_options

    def get_held_layers(self) -> list[nn.Module]:
        return self.native.get_held_layers()

    def get_shared_params(self) -> list[dict[int, Tensor]]:
        return self.native.get_shared_params()


def _native_policy(model: nn.Module) -> Policy:
    """ColossalAI's own policy for the model's class; a `_NoPolicy` if it has none."""
    if not isinstance(model, PreTrainedModel):
        return _NoPolicy()
    try:
        return get_autopolicy(model)
    except NotImplementedError:
        return _NoPolicy()


def _has_alibi(model: nn.Module) -> bool:
    """Whether the attention of BLOOM, or of a Falcon, has ALiBi."""
    config = getattr(model, "config", None)
    return getattr(config, "alibi", getattr(config, "model_type", None) == "bloom")


class _NoPolicy(Policy):
    """The policy of a model for which ColossalAI has none: replaces nothing."""

    def config_sanity_check(self) -> None:
        """Nothing to check."""

    def preprocess(self) -> Any:
        return self.model

    def module_policy(self) -> dict[Any, ModulePolicyDescription]:
        return {}

    postprocess = preprocess
