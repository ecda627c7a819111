"""A mixture with its routers' loss under DDP, FSDP2 and ZeRO: a step equals that of one process.

Four ranks in two groups, each with its own batch (experts_worker.py). The reference is a step of
transformers' model in one process, over both batches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed", exc_type=ImportError)
pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

from tests.integrations.deepspeed_jobs import run_ranks  # noqa: E402
from tests.integrations.experts_worker import (  # noqa: E402
    LEARNING_RATE,
    build_mixture,
    padded_batch,
)

pytestmark = [pytest.mark.deepspeed, pytest.mark.processes]


def step_in_one_process(name: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of the first group's batch, and the weights after a step over both batches."""
    model = build_mixture(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses: list[Any] = [model(**padded_batch(group)).loss for group in (0, 1)]
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
def test_step_equals_that_of_one_process(name: str, engine: str, tmp_path: Path) -> None:
    worker = Path(__file__).with_name("experts_worker.py")
    run_ranks([str(worker), str(tmp_path), name, engine], 4)
    actual = torch.load(tmp_path / f"{name}_{engine}.pt")
    expected_loss, expected_weights = step_in_one_process(name)
    assert actual["loss"] == pytest.approx(expected_loss, rel=1e-5)
    for key, expected in expected_weights.items():
        error = (actual["weights"][key] - expected).abs().max() / expected.abs().max()
        assert error < 1e-5, f"{key}: {error:.1e}"
