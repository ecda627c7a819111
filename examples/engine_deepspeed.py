"""DeepSpeed with WallFacer as the engine of the example."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
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

UNIVERSAL = " universal"


class DeepSpeedEngine:
    """`wf_deepspeed.initialize` behind the methods of `engine.Engine`."""

    def __init__(self, config: str, model: nn.Module, checkpoint: Path | None) -> None:
        words = json.loads(Path(config).read_text())
        self._other_ranks = checkpoint is not None and _is_of_other_ranks(checkpoint)
        if checkpoint is not None and self._other_ranks:
            words["checkpoint"] = {"load_universal": True}
            _convert(checkpoint)
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        # DeepSpeed 0.19 calls collectives by names that torch 2.13 is about to drop.
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        with wf_deepspeed.without_shared_memory_op():
            self._engine, *_ = wf_deepspeed.initialize(
                model=model, model_parameters=list(model.parameters()), config=words
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
        shards = [self._wallfacer.shard_batch(batch) for batch in batches]
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
        shard, sp = self._wallfacer.shard_batch(batch), self._wallfacer.sp
        loss = sp.loss(self._logits(shard), shard["labels"]) * sp.size
        self._engine.train()
        return float(self._wallfacer.mean(loss))

    def save(self, folder: Path, progress: dict[str, int]) -> None:
        """As in `engine.Engine`."""
        tag = f"step{progress['step']}"
        self._engine.save_checkpoint(str(folder), tag=tag, client_state={"progress": progress})

    def load(self, checkpoint: Path) -> dict[str, int]:
        """As in `engine.Engine`."""
        tag = checkpoint.name + (UNIVERSAL if self._other_ranks else "")
        _, client = self._engine.load_checkpoint(str(checkpoint.parent), tag=tag)
        return client["progress"]

    def close(self) -> None:
        """As in `engine.Engine`."""
        self._engine.destroy()
        dist.barrier()
        dist.destroy_process_group()

    def _logits(self, shard: dict[str, Any]) -> Tensor:
        return self._engine(**wf_transformers.forward_kwargs(self._engine, shard)).logits


def _is_of_other_ranks(checkpoint: Path) -> bool:
    """Whether a checkpoint holds the optimizer of ZeRO on another number of ranks than now."""
    parts = len([*checkpoint.glob("*zero_pp_rank_*_optim_states.pt")])
    return parts not in (0, dist.get_world_size())


def _convert(checkpoint: Path) -> None:
    """Write the checkpoint as DeepSpeed reads it on any number of ranks, beside it."""
    if dist.get_rank() == 0:
        out = f"{checkpoint}{UNIVERSAL}"
        module = "deepspeed.checkpoint.ds_to_universal"
        folders = ["--input_folder", str(checkpoint), "--output_folder", out]
        command = [sys.executable, "-m", module, "--inject_missing_state", *folders]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    dist.barrier()
