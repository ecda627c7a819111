"""DeepSpeed with WallFacer as the engine of the example."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine import Batch, StepResult
from torch import Tensor, nn

import wf_deepspeed
import wf_transformers


class DeepSpeedEngine:
    """`wf_deepspeed.initialize` behind the methods of `engine.Engine`."""

    def __init__(self, config: str, model: nn.Module) -> None:
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        # DeepSpeed 0.19 calls collectives by names that torch 2.13 is about to drop.
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        with wf_deepspeed.without_shared_memory_op():
            self._engine, *_ = wf_deepspeed.initialize(
                model=model, model_parameters=list(model.parameters()), config=config
            )
        wallfacer = getattr(self._engine, "wallfacer", None)
        if not isinstance(wallfacer, wf_deepspeed.WallFacer):
            raise ValueError(f'{config} has no enabled "wallfacer" block')
        self._wallfacer = wallfacer
        self.rank = dist.get_rank()
        self.data_parallel_rank = self._wallfacer.data_parallel_rank
        self.data_parallel_size = self._wallfacer.data_parallel_size
        self.accumulation = self._engine.gradient_accumulation_steps()

    def step(self, batches: Sequence[Batch]) -> StepResult:
        """As in `engine.Engine`."""
        shards = [self._shard(batch) for batch in batches]
        token = self._wallfacer.block.loss_average == "token"
        valid = self._wallfacer.count_valid(shards) if token else None
        losses = []
        for shard in shards:
            loss = self._wallfacer.loss(self._logits(shard), shard["labels"], valid)
            self._engine.backward(loss)
            self._engine.step()
            losses.append(loss.detach())
        mean = self._wallfacer.mean(torch.stack(losses).mean())
        sent = sum(self._wallfacer.report().values())
        norm = self._engine.get_global_grad_norm()
        return StepResult(float(mean), float("nan") if norm is None else float(norm), sent)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        """As in `engine.Engine`."""
        self._engine.eval()
        shard, sp = self._shard(batch), self._wallfacer.sp
        loss = sp.loss(self._logits(shard), shard["labels"]) * sp.size
        self._engine.train()
        return float(self._wallfacer.mean(loss))

    def save(self, folder: Path, progress: dict[str, int]) -> None:
        """As in `engine.Engine`."""
        tag = f"step{progress['step']}"
        self._engine.save_checkpoint(str(folder), tag=tag, client_state={"progress": progress})

    def load(self, folder: Path) -> dict[str, int]:
        """As in `engine.Engine`."""
        if not (folder / "latest").exists():
            raise ValueError(f"--resume: no checkpoint in {folder}")
        _, client = self._engine.load_checkpoint(str(folder))
        return client["progress"]

    def close(self) -> None:
        """As in `engine.Engine`."""
        self._engine.destroy()
        dist.barrier()
        dist.destroy_process_group()

    def _shard(self, batch: Batch) -> dict[str, Any]:
        local = self._wallfacer.shard_batch(batch)
        device = self._engine.device
        return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in local.items()}

    def _logits(self, shard: dict[str, Any]) -> Tensor:
        return self._engine(**wf_transformers.forward_kwargs(self._engine, shard)).logits
