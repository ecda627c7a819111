"""DeepSeek-V3 under DeepSpeed with "latents": true: one step is that of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed", exc_type=ImportError)
pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

from tests.integrations.deepspeed_jobs import run_ranks  # noqa: E402
from tests.integrations.families import FAMILIES, MLA, batch, run_on_one_device  # noqa: E402
from tests.integrations.latents_worker import (  # noqa: E402
    LEARNING_RATE,
    build_without_experts,
)

pytestmark = [pytest.mark.deepspeed, pytest.mark.processes]


@pytest.mark.parametrize("stage", [1, 3])
def test_one_step_is_exact_and_sends_latents(stage: int, tmp_path: Path) -> None:
    """1e-5: the ranks compute in float32, the reference in float64."""
    worker = Path(__file__).with_name("latents_worker.py")
    run_ranks([str(worker), str(tmp_path), str(stage)], 2)
    step = torch.load(tmp_path / "step.pt")

    model = build_without_experts()
    expected = run_on_one_device(FAMILIES["deepseek_v3"], build_without_experts().double(), batch())
    for name, before in model.named_parameters():
        update, grad = before - step["weights"][name], LEARNING_RATE * expected.grads[name]
        assert (update - grad).abs().max() < 1e-5 * max(1.0, float(grad.abs().max())), name

    layers, batch_size, itemsize = 2, 2, 4
    rows = 6  # of the first rank's 12 (zigzag), those that the second one sees
    width = MLA["kv_lora_rank"] + MLA["qk_rope_head_dim"]
    assert sum(step["sent"].values()) == layers * batch_size * rows * width * itemsize
