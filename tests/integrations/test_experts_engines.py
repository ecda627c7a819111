"""The routers' loss under DDP, FSDP2 and ZeRO: one step is that of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed", exc_type=ImportError)
pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

from tests.integrations.deepspeed_jobs import run_ranks  # noqa: E402
from tests.integrations.experts_worker import RATE, mixture, padded  # noqa: E402

pytestmark = [pytest.mark.deepspeed, pytest.mark.processes]


def one_process(name: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of the first group's batch, and the weights after a step over both batches."""
    model = mixture(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses: list[Any] = [model(**padded(group)).loss for group in (0, 1)]
    (sum(losses) / 2).backward()
    optimizer.step()
    return float(losses[0]), dict(model.named_parameters())


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        *(("mixtral", engine) for engine in ("ddp", "fsdp2", "zero1", "zero3")),
        *(("qwen3_moe", engine) for engine in ("fsdp2", "zero3")),
    ],
)
def test_one_step(name: str, engine: str, tmp_path: Path) -> None:
    worker = Path(__file__).with_name("experts_worker.py")
    run_ranks([str(worker), str(tmp_path), name, engine], 4)
    found = torch.load(tmp_path / f"{name}_{engine}.pt")
    loss, weights = one_process(name)
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    for key, weight in weights.items():
        error = (found["weights"][key] - weight).abs().max() / weight.abs().max()
        assert error < 1e-5, f"{key}: {error:.1e}"
