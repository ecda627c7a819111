"""DSP under the real DeepSpeed: its averages over the ranks give one rank's training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed", exc_type=ImportError)
pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

from tests.integrations.deepspeed_jobs import run_ranks  # noqa: E402

pytestmark = [pytest.mark.deepspeed, pytest.mark.processes]


def test_zero_0_to_3_train_as_one_rank(tmp_path: Path) -> None:
    worker = Path(__file__).with_name("deepspeed_dsp_worker.py")
    found = {}
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        run_ranks([str(worker), str(folder)], ranks)
        found[ranks] = json.loads((folder / "losses.json").read_text())
    right = found[1]["0"]
    assert right[-1] < right[0] - 0.01
    for losses in (*found[1].values(), *found[2].values()):
        assert losses == pytest.approx(right, abs=1e-5)
