"""A case of colossalai_worker.py, trained with ColossalAI and WallFacer."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.lazy import LazyInitContext
from colossalai.nn.optimizer import HybridAdam

import wf_colossalai
from tests.integrations.colossalai_models import batch, build, total_loss

OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "hybrid_adam": partial(HybridAdam, lr=1e-3, weight_decay=0.01),
}
OTHER_PLUGINS: dict[str, Any] = {
    "ddp": TorchDDPPlugin,
    "zero": LowLevelZeroPlugin,
    "gemini": GeminiPlugin,
}

Steps = list[list[dict[str, Any]]]
Data = tuple[str, str, int, int]
"""The arguments of `steps_of`."""


def steps_of(family: str, variant: str, batches: int, steps: int) -> Steps:
    """The batches of every step."""
    return [
        [batch(family, variant, 100 * step + index) for index in range(batches)]
        for step in range(steps)
    ]


class Training:
    """A case's model, plugin, booster and optimizer, with WallFacer."""

    def __init__(self, case: dict[str, Any], folder: Path) -> None:
        self.case, self.folder = case, folder
        self.family, self.variant = case.get("family", "llama"), case.get("batch", "plain")
        self.sequence_parallel_size = case["wallfacer"].get("sequence_parallel_size", 1)
        self.optimizer_name = case.get("optimizer", "sgd")
        with LazyInitContext() if case.get("lazy") else torch.enable_grad():
            model = build(self.family)
        if case.get("checkpointing") == "before":
            model.gradient_checkpointing_enable()
        self.plugin, self.handle = self._plugin_and_handle(model)
        self.sp = self.handle.sp
        self.booster = Booster(plugin=self.plugin)
        optimizer = OPTIMIZERS[self.optimizer_name](model.parameters())
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer)
        if case.get("checkpointing") == "after":
            self.model.unwrap().gradient_checkpointing_enable()

    def _plugin_and_handle(self, model: Any) -> tuple[Any, Any]:
        if "config" in self.case:
            handle = wf_colossalai.from_config(self.case["config"], model)
            return handle.plugin, handle
        wallfacer, options = self.case["wallfacer"], self.case.get("options", {})
        plugin_name = self.case.get("plugin", "hybrid")
        if plugin_name == "hybrid":
            plugin = wf_colossalai.WallFacerPlugin(**wallfacer, **options)
            return plugin, plugin.handle
        handle = wf_colossalai.apply(model, wallfacer)
        return OTHER_PLUGINS[plugin_name](**options), handle

    @property
    def data_parallel(self) -> tuple[int, int]:
        """(rank, size)."""
        options = self.case.get("options", {})
        ranks_per_replica = (
            self.sequence_parallel_size * options.get("tp_size", 1) * options.get("pp_size", 1)
        )
        return dist.get_rank() // ranks_per_replica, dist.get_world_size() // ranks_per_replica

    @property
    def data(self) -> Data:
        """A batch for each data-parallel rank in every step."""
        return self.family, self.variant, self.data_parallel[1], self.case.get("steps", 20)

    def train(self, first: int = 0, last: int | None = None) -> list[float]:
        """Losses of steps first..last on the ranks that have them."""
        losses = []
        for step, batches in enumerate(steps_of(*self.data)[first:last]):
            loss = self._backward(copy.deepcopy(batches[self.data_parallel[0]]))
            if step == 0:
                self.first_gradients = self._gradients()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses += [] if loss is None else [loss.item()]
        return losses

    def _backward(self, batch: dict[str, Any]) -> Any:
        """Forward and backward of this rank's batch; the loss, None on all but the last stage."""
        if getattr(self.plugin, "stage_manager", None) is None:
            loss = total_loss(self.model(**batch))
            self.booster.backward(loss, self.optimizer)
            return loss
        return self.booster.execute_pipeline(
            iter([batch]),
            self.model,
            lambda out, _: total_loss(out),
            self.optimizer,
            return_loss=True,
        )["loss"]

    def _gradients(self) -> dict[str, Any]:
        parameters = self.model.unwrap().named_parameters()
        return {n: p.grad.clone() for n, p in parameters if p.grad is not None}

    def mean_over_ranks(self, losses: list[float], steps: int) -> list[float]:
        """The mean of every step's loss over the ranks that have one."""
        total = torch.tensor([sum(losses[i : i + 1], 0.0) for i in range(steps)])
        ranks = torch.tensor(float(bool(losses)))
        dist.all_reduce(total)
        dist.all_reduce(ranks)
        return (total / ranks).tolist()

    def weights(self, name: str) -> dict[str, Any]:
        """All weights, gathered on rank 0 by ColossalAI's save_model; {} on other ranks."""
        if self.case.get("no_weights"):
            return {}
        path = self.folder / f"{self.case['name']}_{name}.bin"
        self.booster.save_model(self.model, str(path), shard=False)
        dist.barrier()
        return torch.load(path) if dist.get_rank() == 0 else {}
