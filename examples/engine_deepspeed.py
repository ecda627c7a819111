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

UNIVERSAL_SUFFIX = " universal"  # of the folder of a converted checkpoint


class DeepSpeedEngine:
    """Implements `engine.Engine` with `wf_deepspeed.initialize`."""

    def __init__(self, config: str, model: nn.Module, checkpoint: Path | None) -> None:
        settings = json.loads(Path(config).read_text())
        self._is_converted = checkpoint is not None and _has_other_num_ranks(checkpoint)
        if checkpoint is not None and self._is_converted:
            settings["checkpoint"] = {"load_universal": True}
            _convert_to_universal(checkpoint)
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        # DeepSpeed 0.19 calls collectives by names that torch 2.13 is about to drop.
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        with wf_deepspeed.without_shared_memory_op():
            self._engine, *_ = wf_deepspeed.initialize(
                model=model, model_parameters=list(model.parameters()), config=settings
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
        shards = [self._wallfacer.shard_batch(batch) for batch in batches]
        valid = None
        if self._wallfacer.block.loss_average == "token":
            valid = self._wallfacer.count_valid(shards)
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
        self._engine.eval()
        shard, sp = self._wallfacer.shard_batch(batch), self._wallfacer.sp
        loss = sp.loss(self._logits(shard), shard["labels"]) * sp.size
        self._engine.train()
        return float(self._wallfacer.mean(loss))

    def save(self, folder: Path, progress: dict[str, int]) -> None:
        tag = f"step{progress['step']}"
        self._engine.save_checkpoint(str(folder), tag=tag, client_state={"progress": progress})

    def load(self, checkpoint: Path) -> dict[str, int]:
        tag = checkpoint.name + (UNIVERSAL_SUFFIX if self._is_converted else "")
        _, client = self._engine.load_checkpoint(str(checkpoint.parent), tag=tag)
        return client["progress"]

    def close(self) -> None:
        self._engine.destroy()
        dist.barrier()
        dist.destroy_process_group()

    def _logits(self, shard: dict[str, Any]) -> Tensor:
        return self._engine(**wf_transformers.forward_kwargs(self._engine, shard)).logits


def _has_other_num_ranks(checkpoint: Path) -> bool:
    """Whether ZeRO's optimizer states were saved by another number of ranks than there are now."""
    num_files = len([*checkpoint.glob("*zero_pp_rank_*_optim_states.pt")])
    return num_files not in (0, dist.get_world_size())


def _convert_to_universal(checkpoint: Path) -> None:
    """Write a universal checkpoint, which any number of ranks can load, next to this one."""
    if dist.get_rank() == 0:
        out = f"{checkpoint}{UNIVERSAL_SUFFIX}"
        module = "deepspeed.checkpoint.ds_to_universal"
        folders = ["--input_folder", str(checkpoint), "--output_folder", out]
        command = [sys.executable, "-m", module, "--inject_missing_state", *folders]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    dist.barrier()
