"""The booster plugin: ColossalAI's hybrid parallelism with WallFacer's sequence parallelism."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from colossalai.accelerator import get_accelerator
from colossalai.accelerator.cpu_accelerator import CpuAccelerator
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.tensor.d_tensor.api import is_customized_distributed_tensor
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from wf_backends import SequenceParallelConfig, dsp
from wf_backends._validation import one_of, positive
from wf_backends.parallel import key_hint
from wf_colossalai.config import HYBRID, load, sequence_parallel_config
from wf_colossalai.policy import WallFacerPolicy
from wf_colossalai.sequence import PlainSequenceParallel
from wf_transformers import AUTOCHUNK, MODEL_KEYS, Handle, ModelOptions, refuse_different

PRECISIONS = ("fp16", "bf16", "fp32")
CONFIG_KEYS = tuple(field.name for field in fields(SequenceParallelConfig))
REPLACED_ARGUMENTS: Mapping[str, str] = MappingProxyType(
    {
        "sp_size": "sequence_parallel_size",
        "inner_ring_size": 'route={"name": "double_ring", "inner": ...}',
        "enable_sequence_parallelism": "sequence_parallel_size=1 to switch it off",
        "sequence_parallelism_mode": "route and ulysses_degree",
        "enable_flash_attention": "kernel",
    }
)
"""Arguments of ColossalAI's plugin, and the keys of ours that replace them."""


class WallFacerPlugin(HybridParallelPlugin):
    """Data x sequence x tensor x pipeline parallelism and ZeRO 1 and 2, with exact attention.

        plugin = WallFacerPlugin(sequence_parallel_size=4, route="ring", zero_stage=1)
        model, optimizer, *_ = Booster(plugin=plugin).boost(model, optimizer)
        loss = model(**batch).loss         # a whole batch with "labels", the same on all 4 ranks
        booster.backward(loss, optimizer)  # loss is the mean over all valid tokens, float32

    In training, `logits` hold this rank's rows; after `model.eval()` they hold all of them.

    Args:
        tp_size, pp_size: ranks of tensor parallelism, stages of the pipeline.
        kwargs: the keys of `SequenceParallelConfig` (sequence_parallel_size, route, backward_route,
            backward_moves, ulysses_degree, layout, kernel, ...); activation_checkpointing such as
            {"offload": True}; autochunk such as {"max_memory": "8GB"}; verify (True, False or
            "strict"); and the arguments of ColossalAI's HybridParallelPlugin (zero_stage,
            cpu_offload, precision, num_microbatches, max_norm, custom_policy, ...). The default
            precision is "fp32".

    Raises:
        ValueError: for a wrong key or value, for an argument of ColossalAI's that a key of ours
            replaces, or if the product of the parallel sizes does not divide the world size.
        NotImplementedError: for ZeRO in fp32, which ColossalAI's plugin does not have, for fp16 on
            a CPU outside `cpu_accelerator()`, for gradient_checkpoint_config, for the zero-bubble
            schedule, for "dsp", which other plugins support, and for max_norm of a GPT-2 under
            tensor parallelism; of a call, for a pipeline's gradients that would be summed twice.
    """

    _summed = False  # whether the last call of a pipeline summed gradients over its ranks

    def __init__(self, *, tp_size: int = 1, pp_size: int = 1, **kwargs: Any) -> None:
        _check_keys(kwargs)
        given = {key: kwargs[key] for key in (*CONFIG_KEYS, *MODEL_KEYS) if key in kwargs}
        refuse_different(given | {"tp_size": tp_size, "pp_size": pp_size})
        kwargs, self._model_options = ModelOptions.split(kwargs)
        if self._model_options.autochunk is not None and (tp_size, pp_size) != (1, 1):
            raise NotImplementedError(
                f'"{AUTOCHUNK}" with tp_size {tp_size} and pp_size {pp_size}: both must be 1'
            )
        ours = {key: kwargs.pop(key) for key in CONFIG_KEYS if key in kwargs}
        config = SequenceParallelConfig.from_dict(ours)
        options: dict[str, Any] = {"precision": "fp32"} | kwargs
        _check_options(options)
        parallel_output = options.pop("parallel_output", True)
        _check_world(config.sequence_parallel_size, tp_size, pp_size)
        super().__init__(
            tp_size=tp_size,
            pp_size=pp_size,
            sp_size=config.sequence_parallel_size,
            enable_sequence_parallelism=True,
            sequence_parallelism_mode="ring_attn",
            **options,
        )
        self.shard_config.parallel_output = parallel_output  # "ring_attn" has True alone
        self.sp = PlainSequenceParallel(config, self.sp_group)
        """The sequence parallelism of this rank; `plugin.sp.report()` returns the bytes it sent."""
        self.sp.owner = self
        self.handle = Handle(self.sp)
        """Undoes the changes that boosting makes to the model."""
        self.handle.data_parallel_rank = dist.get_rank(self.dp_group)
        self.handle.data_parallel_size = self.dp_group.size()

    @classmethod
    def from_config(cls, path: str | Path) -> WallFacerPlugin:
        """Make the plugin of a JSON file, from its blocks "wallfacer" and "colossalai".

        Raises:
            ValueError: names an unknown key, or a key with a wrong value.
        """
        config = load(path)
        options = dict(config.get("colossalai", {}))
        if options.pop("plugin", HYBRID) != HYBRID:
            raise ValueError(
                f'{path}: "colossalai.plugin" is {config["colossalai"]["plugin"]!r}; use '
                "wf_colossalai.from_config(path, model), which makes that plugin"
            )
        return cls(**sequence_parallel_config(config), **options)

    def __del__(self) -> None:
        if hasattr(self, "pg_mesh"):  # absent if __init__ raised before it made process groups
            super().__del__()

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader[Any] | None = None,
        lr_scheduler: Any = None,
    ) -> Any:
        """Do what ColossalAI's plugin does, with `WallFacerPolicy()` as the default policy."""
        custom_policy = self.custom_policy
        if custom_policy is None:
            self.custom_policy = WallFacerPolicy()
        self.custom_policy.of_plugin = self.handle, self._model_options
        # The group that ColossalAI names to Lamb, CAME and Adafactor: ZeRO shards over all of it
        dp_group, self.dp_group = self.dp_group, self.mixed_dp_group
        try:
            boosted = super().configure(model, optimizer, criterion, dataloader, lr_scheduler)
        finally:
            self.custom_policy, self.dp_group = custom_policy, dp_group
        if self.max_norm and any(map(is_customized_distributed_tensor, boosted[0].parameters())):
            raise NotImplementedError(
                f"max_norm={self.max_norm} with tp_size={self.tp_size} and fused weights (GPT-2): "
                "ColossalAI counts their gradients as whole on every rank, so that the norm would "
                "be too small; leave max_norm out, or set tp_size=1"
            )
        return boosted

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: Any,
        criterion: Callable[..., Any],
        optimizer: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Do what ColossalAI's plugin does; refuses to sum gradients of tied weights twice."""
        grads = (p.grad for p in model.parameters() if p.grad is not None)
        if self._summed and model.shared_params and any(bool(grad.any()) for grad in grads):
            raise NotImplementedError(
                "the gradient of tied weights was summed over the stages, and ColossalAI would sum "
                "it again: put all calls of execute_pipeline but the last one before "
                "optimizer.step() into booster.no_sync(model, optimizer), and call "
                "optimizer.zero_grad() after the step"
            )
        outputs = super().execute_pipeline(data_iter, model, criterion, optimizer, *args, **kwargs)
        self._summed = model.require_grad_sync and getattr(optimizer, "require_grad_sync", True)
        return outputs


def _check_keys(kwargs: dict[str, Any]) -> None:
    """Refuse keyword arguments that are unknown, replaced by ours, or not supported here."""
    theirs = inspect.signature(HybridParallelPlugin.__init__).parameters
    kept = (name for name in theirs if name != "self" and name not in REPLACED_ARGUMENTS)
    known = [*CONFIG_KEYS, *MODEL_KEYS, *kept]
    if dsp.KEY in kwargs:
        raise NotImplementedError(
            f'"{dsp.KEY}" is not supported by the hybrid plugin; use wf_colossalai.apply, or '
            '"plugin": "torch_ddp", "low_level_zero" or "gemini" in the file'
        )
    for name, value in kwargs.items():
        if name in REPLACED_ARGUMENTS:
            raise ValueError(f"{name}={value!r}: use {REPLACED_ARGUMENTS[name]} instead")
        if name not in known:
            raise ValueError(f"unknown argument {name!r}{key_hint(name, known)} (known: {known})")


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse values of ColossalAI's arguments that do not work."""
    one_of("precision", options["precision"], PRECISIONS)
    if options.get("zero_stage", 0) not in (0, 1, 2):
        raise ValueError(f"zero_stage must be 0, 1 or 2, got {options['zero_stage']!r}")
    if options.get("zero_stage") and options["precision"] == "fp32":
        raise NotImplementedError(
            f'zero_stage={options["zero_stage"]} with precision="fp32" is not in ColossalAI\'s '
            'HybridParallelPlugin; use "bf16", or LowLevelZeroPlugin(precision="fp32") with '
            "wf_colossalai.apply"
        )
    # ColossalAI's loss scaling needs the device count, and its CpuAccelerator has none
    if options["precision"] == "fp16" and type(get_accelerator()) is CpuAccelerator:
        raise NotImplementedError(
            'precision="fp16" on a CPU is not in ColossalAI: use "bf16" or "fp32", or put the job '
            "into cpu_accelerator() (docs/colossalai.md, Limits)"
        )
    if options.get("gradient_checkpoint_config") is not None:
        raise NotImplementedError(
            "gradient_checkpoint_config is for ColossalAI's own forwards, which do not run here: "
            "leave it out; model.gradient_checkpointing_enable() checkpoints every layer"
        )
    policy = options.get("custom_policy")
    if policy is not None and not isinstance(policy, WallFacerPolicy):
        raise ValueError(
            f"custom_policy must be a WallFacerPolicy, got a {type(policy).__name__}, which "
            "would bring ColossalAI's own sequence parallelism; give it as "
            "WallFacerPolicy(native=...)"
        )


def _check_world(sp_size: int, tp_size: int, pp_size: int) -> None:
    positive("tp_size", tp_size)
    positive("pp_size", pp_size)
    world_size = dist.get_world_size()
    if world_size % (sp_size * tp_size * pp_size):
        raise ValueError(
            f"sequence_parallel_size {sp_size} x tp_size {tp_size} x pp_size {pp_size} must "
            f"divide the {world_size} ranks of the world"
        )
