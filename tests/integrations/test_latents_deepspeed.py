"""DeepSeek-V3 under DeepSpeed with "latents": true: one step is that of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed", exc_type=ImportError)
pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

from tests.integrations.deepspeed_jobs import run_ranks  # noqa: E402
from tests.integrations.families import FAMILIES, MLA, alone, batch  # noqa: E402
from tests.integrations.latents_worker import RATE, dense  # noqa: E402

pytestmark = [pytest.mark.deepspeed, pytest.mark.processes]


@pytest.mark.parametrize("stage", [1, 3])
def test_one_step(stage: int, tmp_path: Path) -> None:
    run_ranks([str(Path(__file__).with_name("latents_worker.py")), str(tmp_path), str(stage)], 2)
    found = torch.load(tmp_path / "found.pt")
    model = dense().double()
    *_, gradients = alone(FAMILIES["deepseek_v3"], model, batch())
    for name, before in dense().named_parameters():
        step, wanted = before - found["weights"][name], RATE * gradients[name]
        assert (step - wanted).abs().max() < 1e-5 * max(1.0, float(wanted.abs().max())), name
    width = MLA["kv_lora_rank"] + MLA["qk_rope_head_dim"]
    rows = 6  # of the first rank's 12 (zigzag), those that the other sees
    assert sum(found["sent"].values()) == 2 * 2 * rows * width * 4  # layers, batch, ..., float32
