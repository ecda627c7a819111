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

    def __init__(
        self,
        words: SequenceParallelConfig | Mapping[str, Any] | None = None,
        native: Policy | None = None,
    ) -> None:
        super().__init__()
        self._words, self._native = words, native
        self.of_plugin: tuple[Handle, ModelWords] | None = None
        """What takes back what is done to the model of a WallFacerPlugin, and how it is run."""
        self.handle: Handle | None = None
        """What was done to the model, once it is boosted; `handle.report()`."""

    @property
    def native(self) -> Policy:
        assert self._native is not None, "set_model comes first"
        return self._native

    def set_model(self, model: nn.Module) -> None:
        """Look at the model: its attention, and ColossalAI's policy for it.

        Raises:
            ValueError: if its attention is not in the table.
        """
        super().set_model(model)
        self._row = find(model, self.table)
        if self._native is None:
            pretrained = isinstance(model, PreTrainedModel)
            self._native = get_autopolicy(model) if pretrained else _NoPolicy()
        self._native.set_model(model)
        setattr(self._native, "is_causal", self._row.causal)  # noqa: B010  (typed as None there)

    def config_sanity_check(self) -> None:
        """Refuse what would be computed wrongly.

        Raises:
            ValueError: for a carrier mode that ties sequence to tensor parallelism.
            NotImplementedError: for a pipeline of a model that has none with us.
        """
        config = self._config
        if config.sequence_parallelism_mode not in CARRIERS:
            raise ValueError(
                f"sequence_parallelism_mode must be one of {list(CARRIERS)} with a WallFacer "
                f"policy (with enable_sequence_parallelism=True), got "
                f"{config.sequence_parallelism_mode!r}"
            )
        stages = config.pipeline_stage_manager
        if stages is not None and stages.use_zbv:
            raise NotImplementedError(
                'pp_style="zbv", ColossalAI\'s zero-bubble schedule, is not supported (it hangs): '
                'use "1f1b" or "interleaved"'
            )
        if stages is not None and not self._has_stages:
            raise NotImplementedError(
                f"pipeline parallelism of {type(self.model).__name__} is not supported (set "
                "pp_size=1); it is for transformers' models that ColossalAI has a policy for"
            )
        if config.enable_tensor_parallelism and isinstance(self.native, _NoPolicy):
            raise NotImplementedError(
                f"ColossalAI has no policy for {type(self.model).__name__}: set tp_size=1"
            )

    @property
    def _has_stages(self) -> bool:
        return isinstance(self.model, PreTrainedModel) and not isinstance(self.native, _NoPolicy)

    def set_shard_config(self, shard_config: ShardConfig) -> None:
        super().set_shard_config(shard_config)
        self.native.set_shard_config(
            replace(
                self._config,
                enable_sequence_parallelism=False,
                sequence_parallelism_mode=None,  # type: ignore[arg-type]
                enable_flash_attention=False,
                enable_all_optimization=False,
            )
        )

    @property
    def _config(self) -> ShardConfig:
        assert self.shard_config is not None, "set_shard_config comes first"
        return self.shard_config

    def preprocess(self) -> nn.Module:
        """Compare the model on the ranks with it alone, while no rank has a part of it only."""
        self._sp, self._run = self._read()
        model = self.native.model
        assert model is not None, "set_model comes first"
        attached = self._run.attaching(model, partial(attach, model, self._sp, self.table))
        verify(model, self._sp, attached, self._run.verify, whole_batches=True)
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
        split = self._config.enable_tensor_parallelism and self._config.parallel_output
        group = self._config.tensor_parallel_process_group if split else None
        stages = self.pipeline_stage_manager
        make = partial(attach, self.model, self._sp, self.table, group, stages)
        make = self._run.attaching(self.model, make)
        cut = self._config.enable_tensor_parallelism or self.pipeline_stage_manager is not None
        self.handle, _ = attach_by(self._run, self.model, self._sp, make, compares=not cut)
        if self._words is None and self.of_plugin is not None:
            self.of_plugin[0].undo.push(self.handle.undo)
        return self.model

    def _read(self) -> tuple[SequenceParallel, ModelWords]:
        given = self._words
        if given is None and self.of_plugin is not None:
            return self.of_plugin[0].sp, self.of_plugin[1]
        words = given.to_dict() if isinstance(given, SequenceParallelConfig) else given or {}
        words, run = ModelWords.split(words)
        return self._sequence_parallel(words), run

    def _sequence_parallel(self, words: Mapping[str, Any]) -> SequenceParallel:
        size = self._config.sequence_parallel_size
        words = {"sequence_parallel_size": size} | dict(words)
        if words["sequence_parallel_size"] != size:
            raise ValueError(
                f"sequence_parallel_size {words['sequence_parallel_size']} of the policy must be "
                f"the plugin's sp_size {size}; leave it out"
            )
        config = SequenceParallelConfig.from_dict(words)
        return PlainSequenceParallel(config, self._config.sequence_parallel_process_group)

    def get_held_layers(self) -> list[nn.Module]:
        return self.native.get_held_layers()

    def get_shared_params(self) -> list[dict[int, Tensor]]:
        return self.native.get_shared_params()


class _NoPolicy(Policy):
    """For a model that ColossalAI knows nothing of: nothing is replaced."""

    def config_sanity_check(self) -> None:
        pass

    def preprocess(self) -> nn.Module:
        return self._whole

    def module_policy(self) -> dict[Any, ModulePolicyDescription]:
        return {}

    def postprocess(self) -> nn.Module:
        return self._whole

    @property
    def _whole(self) -> nn.Module:
        assert self.model is not None, "set_model comes first"
        return self.model
