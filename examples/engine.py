"""The interface between the training loop and a framework; one file per framework implements it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn

Batch = Mapping[str, Any]  # "input_ids", "labels" (1, S) int64 and "cu_seqlens": host ints


@dataclass(frozen=True, slots=True)
class StepResult:
    """Figures of one optimizer step, the same on every rank."""

    loss: float
    """Mean over the valid tokens of the step, nats per token."""
    grad_norm: float
    """Before clipping; nan where the framework does not report it (DeepSpeed at ZeRO 0)."""
    bytes_sent: int
    """Bytes that this rank's attention sent."""


class Engine(Protocol):
    """A model under some framework, on every rank of the job."""

    rank: int
    data_parallel_rank: int
    data_parallel_size: int
    accumulation: int
    """Micro-batches that each data-parallel rank gives to one optimizer step."""

    def step(self, batches: Sequence[Batch]) -> StepResult:
        """One optimizer step over `accumulation` full batches.

        All ranks of a sequence-parallel group pass the same batches; the engine shards them.
        """
        ...

    def evaluate(self, batch: Batch) -> float:
        """Mean loss of one full batch per data-parallel rank."""
        ...

    def save(self, folder: Path, progress: dict[str, int]) -> None:
        """Write a checkpoint of model, optimizer and `progress` into `folder`."""
        ...

    def load(self, checkpoint: Path) -> dict[str, int]:
        """Read a checkpoint that `save` wrote on any number of ranks; return its `progress`."""
        ...

    def close(self) -> None:
        """Destroy the process groups."""
        ...


def open_engine(name: str, config: str, model: nn.Module, checkpoint: Path | None = None) -> Engine:
    """The engine called `name` around `model`.

    Args:
        checkpoint: the one that `load` will read later, or None; DeepSpeed prepares for it here.

    Raises:
        ValueError: for an unknown name.
    """
    if name == "deepspeed":
        from engine_deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(config, model, checkpoint)
    if name == "colossalai":
        from engine_colossalai import ColossalAIEngine

        return ColossalAIEngine(config, model)
    if name == "torch":
        from engine_torch import TorchEngine

        return TorchEngine(config, model)
    raise ValueError(f"--engine must be 'deepspeed', 'colossalai' or 'torch', got {name!r}")
