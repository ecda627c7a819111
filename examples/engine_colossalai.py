"""ColossalAI with WallFacer as the engine of the example."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster
from engine import Batch, StepResult
from ranks import mean_over_ranks, read_progress, to_device, write_checkpoint
from torch import nn

import wf_colossalai
from wf_colossalai.cpu import cpu_accelerator


class ColossalAIEngine:
    """Implements `engine.Engine` with `wf_colossalai.from_config` and a Booster."""

    def __init__(self, config: str, model: nn.Module) -> None:
        self._stack = ExitStack()
        if not torch.cuda.is_available():
            self._stack.enter_context(cpu_accelerator())
        handle = wf_colossalai.from_config(config, model)
        if getattr(handle.plugin, "stage_manager", None) is not None:
            raise ValueError(f"{config}: pp_size must be 1, the example runs no pipeline")
        self._sp = handle.sp
        self.rank = dist.get_rank()
        self.data_parallel_rank = handle.data_parallel_rank
        self.data_parallel_size = handle.data_parallel_size
        self.accumulation = handle.config.get("gradient_accumulation_steps", 1)
        optimizer = _make_optimizer(model, handle.config.get("optimizer", {}))
        self._booster = Booster(plugin=handle.plugin)
        boosted: Any = self._booster.boost(model, optimizer)
        self._model, self._optimizer = boosted[:2]
        self._device = get_accelerator().get_current_device()

    def step(self, batches: Sequence[Batch]) -> StepResult:
        losses = []
        for batch in batches:
            loss = self._model(**to_device(batch, self._device)).loss
            self._booster.backward(loss / len(batches), self._optimizer)
            losses.append(loss.detach())
        self._optimizer.step()
        self._optimizer.zero_grad()
        sent = sum(self._sp.report().values())
        return StepResult(mean_over_ranks(torch.stack(losses).mean()), self._grad_norm(), sent)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        self._model.eval()
        loss = self._model(**to_device(batch, self._device)).loss
        self._model.train()
        return mean_over_ranks(loss)

    def save(self, folder: Path, progress: dict[str, int]) -> None:
        with write_checkpoint(folder, progress) as path:
            self._booster.save_model(self._model, str(path / "model"), shard=True)
            self._booster.save_optimizer(self._optimizer, str(path / "optimizer"), shard=True)

    def load(self, checkpoint: Path) -> dict[str, int]:
        self._booster.load_model(self._model, str(checkpoint / "model"))
        self._booster.load_optimizer(self._optimizer, str(checkpoint / "optimizer"))
        return read_progress(checkpoint)

    def close(self) -> None:
        self._stack.close()
        dist.barrier()
        dist.destroy_process_group()

    def _grad_norm(self) -> float:
        """The norm before clipping; nan where the plugin does not report it."""
        try:
            norm = self._optimizer.get_grad_norm()
        except NotImplementedError:
            norm = None
        return float("nan") if norm is None else float(norm)


def _make_optimizer(model: nn.Module, settings: dict[str, Any]) -> torch.optim.Optimizer:
    """The optimizer of the JSON: {"type": "AdamW" | "HybridAdam" | "SGD", "params": {...}}."""
    from colossalai.nn.optimizer import HybridAdam

    optimizers = {"AdamW": torch.optim.AdamW, "HybridAdam": HybridAdam, "SGD": torch.optim.SGD}
    name = settings.get("type", "AdamW")
    if name not in optimizers:
        raise ValueError(f'"optimizer.type" must be one of {", ".join(optimizers)}, got {name!r}')
    return optimizers[name](model.parameters(), **settings.get("params", {}))
