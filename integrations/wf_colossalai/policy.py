"""A shardformer policy: ColossalAI's own for the model, with our sequence parallelism in it."""

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
from wf_transformers import Handle, ModelWords, attach_by, verify

CARRIERS = ("ring_attn", "all_to_all")


class WallFacerPolicy(Policy):
    """Tensor and pipeline parallelism are ColossalAI's; sequences are spread by us.

    ColossalAI's policy for the model sees a shard config without sequence parallelism, so that it
    replaces no attention. Class attribute `table`: the attention modules that are known.

    Args:
        words: a SequenceParallelConfig or its words, "activation_checkpointing" and "verify" among
            them if they are wanted; sequence_parallel_size may be left out (it is the plugin's
            sp_size). None: those of the WallFacerPlugin.
        native: the policy for tensor and pipeline parallelism. None: ColossalAI's own for this
            class of models, if it has one.
    """

    table: Mapping[str, AttentionModule] = TABLE
    shard_config: Any
    model: Any

    def __init__(
        self,
        words: SequenceParallelConfig | Mapping[str, Any] | None = None,
        native: Policy | None = None,
    ) -> None:
        super().__init__()
        self.native: Any = native
        self._words = words
        self.of_plugin: tuple[Handle, ModelWords] | None = None
        """What takes back what is done to the model of a WallFacerPlugin, and how it is run."""
        self.handle: Handle | None = None
        """What was done to the model, once it is boosted; `handle.report()`."""

    def set_model(self, model: nn.Module) -> None:
        """Look at the model: its attention, and ColossalAI's policy for it.

        Raises:
            ValueError: if its attention is not in the table.
        """
        super().set_model(model)
        row = find(model, self.table)
        if self.native is None:
            pretrained = isinstance(model, PreTrainedModel)
            self.native = get_autopolicy(model) if pretrained else _NoPolicy()
        self.native.set_model(model)
        self.native.is_causal = row.causal

    def config_sanity_check(self) -> None:
        """Refuse what would be computed wrongly.

        Raises:
            ValueError: for a carrier mode that ties sequence to tensor parallelism.
            NotImplementedError: for a pipeline of a model that has none with us.
        """
        config, stages = self.shard_config, self.pipeline_stage_manager
        if config.sequence_parallelism_mode not in CARRIERS:
            raise ValueError(
                f"sequence_parallelism_mode must be one of {list(CARRIERS)} with a WallFacer "
                f"policy (with enable_sequence_parallelism=True), got "
                f"{config.sequence_parallelism_mode!r}"
            )
        if stages is not None and stages.use_zbv:
            raise NotImplementedError(
                'pp_style="zbv", ColossalAI\'s zero-bubble schedule, is not supported (it hangs): '
                'use "1f1b" or "interleaved"'
            )
        unknown = isinstance(self.native, _NoPolicy)
        if stages is not None and (unknown or not isinstance(self.model, PreTrainedModel)):
            raise NotImplementedError(
                f"pipeline parallelism of {type(self.model).__name__} is not supported (set "
                "pp_size=1); it is for transformers' models that ColossalAI has a policy for"
            )
        if config.enable_tensor_parallelism and unknown:
            raise NotImplementedError(
                f"ColossalAI has no policy for {type(self.model).__name__}: set tp_size=1"
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
        """Compare the model on the ranks with it alone, while no rank has a part of it only."""
        self._sp, self._run = self._read()
        make = partial(attach, self.model, self._sp, self.table)
        attached = self._run.attaching(self.model, make)
        verify(self.model, self._sp, attached, self._run.verify, whole_batches=True)
        return self.native.preprocess()

    def module_policy(self) -> dict[Any, ModulePolicyDescription]:
        """ColossalAI's own, without the forwards that it replaces."""
        descriptions = self.native.module_policy()
        for key, description in descriptions.items():
            methods = description.method_replacement
            if methods and self._is_ours(key):
                description.method_replacement = {
                    k: v for k, v in methods.items() if k != "forward"
                }
        return descriptions

    def _is_ours(self, key: Any) -> bool:
        bases = {base.__name__ for base in getattr(key, "__mro__", ())} | {key}
        return bool(bases & set(self.table)) or "PreTrainedModel" in bases

    def postprocess(self) -> nn.Module:
        self.model = self.native.postprocess()
        config, stages = self.shard_config, self.pipeline_stage_manager
        split = config.enable_tensor_parallelism and config.parallel_output
        group = config.tensor_parallel_process_group if split else None
        make = partial(attach, self.model, self._sp, self.table, group, stages)
        make = self._run.attaching(self.model, make)
        cut = config.enable_tensor_parallelism or stages is not None
        self.handle, _ = attach_by(self._run, self.model, self._sp, make, compares=not cut)
        if self._words is None and self.of_plugin is not None:
            self.of_plugin[0].undo.push(self.handle.undo)
        return self.model

    def _read(self) -> tuple[SequenceParallel, ModelWords]:
        """The sequence parallelism and how the model is run: of the words, else of the plugin."""
        given, size = self._words, self.shard_config.sequence_parallel_size
        if given is None and self.of_plugin is not None:
            return self.of_plugin[0].sp, self.of_plugin[1]
        words = given.to_dict() if isinstance(given, SequenceParallelConfig) else given or {}
        words, run = ModelWords.split({"sequence_parallel_size": size} | dict(words))
        if words["sequence_parallel_size"] != size:
            raise ValueError(
                f"sequence_parallel_size {words['sequence_parallel_size']} of the policy must be "
                f"the plugin's sp_size {size}; leave it out"
            )
        config = SequenceParallelConfig.from_dict(words)
        sp = PlainSequenceParallel(config, self.shard_config.sequence_parallel_process_group)
        return sp, run

    def get_held_layers(self) -> list[nn.Module]:
        return self.native.get_held_layers()

    def get_shared_params(self) -> list[dict[int, Tensor]]:
        return self.native.get_shared_params()


class _NoPolicy(Policy):
    """For a model that ColossalAI knows nothing of: nothing is replaced."""

    def config_sanity_check(self) -> None:
        """Everything is fine."""

    def preprocess(self) -> Any:
        return self.model

    def module_policy(self) -> dict[Any, ModulePolicyDescription]:
        return {}

    postprocess = preprocess
