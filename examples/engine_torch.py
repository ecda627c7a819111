"""torch's own FSDP2 or DDP with WallFacer as the engine of the example."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from engine import Batch, StepResult
from ranks import mean_over_ranks, read_progress, to_device, write_checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import wf_transformers
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import own_group

KEYS = ("wallfacer", "parallelism", "replicas", "bf16", "recompute", "accumulation")
KEYS += ("gradient_clipping", "optimizer")


class TorchEngine:
    """Implements `engine.Engine` with `fully_shard` or `DistributedDataParallel`.

    Both average gradients over all ranks; the loss of the handle is scaled for that.
    """

    def __init__(self, config: str, model: Any) -> None:
        settings = _read_config(config)
        sp_config = SequenceParallelConfig.from_dict(settings["wallfacer"])
        sp = SequenceParallel(sp_config, own_group(sp_config.timeout))
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._handle = wf_transformers.attach(model.to(self._device), sp)
        if settings.get("recompute", False):
            model.gradient_checkpointing_enable()
        self.rank = dist.get_rank()
        self.data_parallel_rank = self._handle.data_parallel_rank
        self.data_parallel_size = self._handle.data_parallel_size
        self.accumulation: int = settings.get("accumulation", 1)
        self._clipping = float(settings.get("gradient_clipping", "inf"))
        parallelise = PARALLELISMS[settings.get("parallelism", "fsdp")]
        self._model = parallelise(model, settings.get("bf16", False), settings.get("replicas"))
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), **settings.get("optimizer", {})
        )

    def step(self, batches: Sequence[Batch]) -> StepResult:
        shards = [self._shard(batch) for batch in batches]
        losses = []
        for i, shard in enumerate(shards):
            self._set_gradient_sync(i == len(shards) - 1)  # average gradients once per step
            loss = self._loss(shard) / len(shards)
            loss.backward()
            losses.append(loss.detach())
        norm = clip_grad_norm_(self._model.parameters(), self._clipping)
        self._optimizer.step()
        self._optimizer.zero_grad()
        sent = sum(self._handle.report().values())
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        return StepResult(mean_over_ranks(torch.stack(losses).sum()), float(norm), sent)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        self._model.eval()
        loss = self._loss(self._shard(batch))
        self._model.train()
        return mean_over_ranks(loss)

    def save(self, folder: Path, progress: dict[str, int]) -> None:
        with write_checkpoint(folder, progress) as path:
            dcp.save(self._state(), checkpoint_id=path)

    def load(self, checkpoint: Path) -> dict[str, int]:
        state = self._state()
        dcp.load(state, checkpoint_id=checkpoint)
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return read_progress(checkpoint)

    def close(self) -> None:
        dist.barrier()
        dist.destroy_process_group()

    def _shard(self, batch: Batch) -> dict[str, Any]:
        return self._handle.shard_batch(to_device(batch, self._device))

    def _loss(self, shard: dict[str, Any]) -> Tensor:
        """This rank's part of the loss; the mean over all ranks is the loss of the step."""
        logits = self._model(**wf_transformers.forward_kwargs(self._model, shard)).logits
        return self._handle.loss(logits, shard["labels"])

    def _set_gradient_sync(self, enabled: bool) -> None:
        """Whether the next backward averages gradients over the ranks."""
        if isinstance(self._model, DistributedDataParallel):
            self._model.require_backward_grad_sync = enabled
        else:
            self._model.set_requires_gradient_sync(enabled)

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}


def _fully_sharded(model: Any, bf16: bool, replicas: int | None) -> Any:
    """FSDP2, layer by layer. With `bf16` it computes in bfloat16; parameters stay float32.

    Args:
        replicas: copies of the parameters, each sharded over neighbouring ranks (HSDP); None = 1.
    """
    policy = MixedPrecisionPolicy()
    if bf16:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    shape, names = mesh_shape(1 if replicas is None else replicas, dist.get_world_size())
    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def mesh_shape(replicas: int, size: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Shape and dimension names of the device mesh: (shards,) or (replicas, shards).

    Raises:
        ValueError: if `replicas` does not divide `size`, the number of ranks.
    """
    if replicas < 1 or size % replicas:
        raise ValueError(f'"replicas" must divide the {size} ranks, got {replicas}')
    if replicas == 1:
        return (size,), ("shard",)
    return (replicas, size // replicas), ("replicate", "shard")


def _replicated(model: nn.Module, bf16: bool, replicas: int | None) -> Any:
    """DDP: parameters in full on every rank; it has no mixed precision of its own."""
    if bf16 or replicas is not None:
        raise ValueError('"bf16" and "replicas" need "parallelism": "fsdp"')
    return DistributedDataParallel(model)


PARALLELISMS = {"fsdp": _fully_sharded, "ddp": _replicated}


def _read_config(config: str) -> dict[str, Any]:
    """The settings in the JSON file.

    Raises:
        ValueError: for an unknown key or an unknown parallelism.
    """
    settings = json.loads(Path(config).read_text())
    unknown = [key for key in settings if key not in KEYS]
    if unknown or "wallfacer" not in settings:
        raise ValueError(
            f'{config} must have "wallfacer", and no key but {KEYS}, got {list(settings)}'
        )
    parallelism = settings.get("parallelism", "fsdp")
    accumulation = settings.get("accumulation", 1)
    if not isinstance(accumulation, int) or accumulation < 1:
        raise ValueError(f'"accumulation" must be a positive integer, got {accumulation!r}')
    if parallelism not in PARALLELISMS:
        raise ValueError(f'"parallelism" must be one of {list(PARALLELISMS)}, got {parallelism!r}')
    return settings
