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
from ranks import mean_over_ranks, progress_of, saved, to_device
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
    """A model under `fully_shard` or `DistributedDataParallel`, its attention by WallFacer.

    Both average gradients over all ranks, and the handle's loss counts on it.
    """

    def __init__(self, config: str, model: Any) -> None:
        words = _read(config)
        spread = SequenceParallelConfig.from_dict(words["wallfacer"])
        sp = SequenceParallel(spread, own_group(spread.timeout))  # a queue of its own
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._handle = wf_transformers.attach(model.to(self._device), sp)
        if words.get("recompute", False):
            model.gradient_checkpointing_enable(self._handle.checkpoint_kwargs)
        self.rank = dist.get_rank()
        self.data_parallel_rank = self._handle.data_parallel_rank
        self.data_parallel_size = self._handle.data_parallel_size
        self.accumulation: int = words.get("accumulation", 1)
        self._clipping = float(words.get("gradient_clipping", "inf"))
        parallelise = PARALLELISMS[words.get("parallelism", "fsdp")]
        self._model = parallelise(model, words.get("bf16", False), words.get("replicas"))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), **words.get("optimizer", {}))

    def step(self, batches: Sequence[Batch]) -> StepResult:
        """As in `engine.Engine`."""
        shards, losses = [self._shard(batch) for batch in batches], []
        for at, shard in enumerate(shards, 1):
            self._sync(at == len(shards))
            loss = self._loss(shard) / len(shards)
            loss.backward()
            losses.append(loss.detach())
        norm = clip_grad_norm_(self._model.parameters(), self._clipping)
        self._optimizer.step()
        self._optimizer.zero_grad()
        sent = sum(self._handle.report().values())
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return StepResult(mean_over_ranks(torch.stack(losses).sum()), float(whole), sent)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        """As in `engine.Engine`."""
        self._model.eval()
        loss = self._loss(self._shard(batch))
        self._model.train()
        return mean_over_ranks(loss)

    def save(self, folder: Path, progress: dict[str, int]) -> None:
        """As in `engine.Engine`."""
        with saved(folder, progress) as part:
            dcp.save(self._state(), checkpoint_id=part)

    def load(self, checkpoint: Path) -> dict[str, int]:
        """As in `engine.Engine`."""
        state = self._state()
        dcp.load(state, checkpoint_id=checkpoint)
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return progress_of(checkpoint)

    def close(self) -> None:
        """As in `engine.Engine`."""
        dist.barrier()
        dist.destroy_process_group()

    def _shard(self, batch: Batch) -> dict[str, Any]:
        return self._handle.shard_batch(to_device(batch, self._device))

    def _loss(self, shard: dict[str, Any]) -> Tensor:
        """Of this rank's tokens; the mean over all ranks is the mean loss of all sequences."""
        logits = self._model(**wf_transformers.forward_kwargs(self._model, shard)).logits
        return self._handle.loss(logits, shard["labels"])

    def _sync(self, now: bool) -> None:
        """Whether the next backward is to bring gradients together."""
        if isinstance(self._model, DistributedDataParallel):
            self._model.require_backward_grad_sync = now
        else:
            self._model.set_requires_gradient_sync(now)

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}


def _fully_sharded(model: Any, bf16: bool, replicas: int | None) -> Any:
    """FSDP2, layer by layer; computing in bfloat16 if asked for, parameters in float32.

    Args:
        replicas: how many times the parameters are there, each time sharded over neighbours.
    """
    policy = MixedPrecisionPolicy()
    if bf16:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    shape, names = mesh_of(1 if replicas is None else replicas, dist.get_world_size())
    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def mesh_of(replicas: int, size: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Ranks by replica and shard, and what torch calls the dimensions.

    Raises:
        ValueError: if the replicas do not have as many ranks each.
    """
    if replicas < 1 or size % replicas:
        raise ValueError(f'"replicas" must divide the {size} ranks, got {replicas}')
    if replicas == 1:
        return (size,), ("shard",)
    return (replicas, size // replicas), ("replicate", "shard")


def _replicated(model: nn.Module, bf16: bool, replicas: int | None) -> Any:
    """DDP, which has no precision of its own, and a replica on every rank."""
    if bf16 or replicas is not None:
        raise ValueError('"bf16" and "replicas" need "parallelism": "fsdp"')
    return DistributedDataParallel(model)


PARALLELISMS = {"fsdp": _fully_sharded, "ddp": _replicated}


def _read(config: str) -> dict[str, Any]:
    """The JSON file.

    Raises:
        ValueError: for a key or a parallelism that there is not.
    """
    words = json.loads(Path(config).read_text())
    unknown = [key for key in words if key not in KEYS]
    if unknown or "wallfacer" not in words:
        raise ValueError(f'{config} must have "wallfacer", and of {KEYS} alone, got {list(words)}')
    kind = words.get("parallelism", "fsdp")
    if kind not in PARALLELISMS:
        raise ValueError(f'"parallelism" must be one of {list(PARALLELISMS)}, got {kind!r}')
    return words
