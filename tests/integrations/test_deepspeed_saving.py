"""A checkpoint of DeepSpeed that a killed rank left incomplete is not found: the one before is."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")

from tests.integrations.deepspeed_jobs import run_ranks  # noqa: E402
from wf_backends.checkpoints import complete, find_checkpoint  # noqa: E402

pytestmark = pytest.mark.processes
SCRIPT = str(Path(__file__).with_name("deepspeed_killed_save.py"))


def test_a_rank_killed_while_it_saves_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"ranks \[(0, )?1\] failed"):
        run_ranks([SCRIPT, str(tmp_path)], 2)
    assert complete(tmp_path) == ["step1"]
    assert find_checkpoint(tmp_path).name == "step1"
    assert len([*(tmp_path / "step1").glob("*optim_states.pt")]) == 2
    with pytest.raises(ValueError, match="'step2' .* is incomplete: .* complete one is 'step1'"):
        find_checkpoint(tmp_path, "step2")
