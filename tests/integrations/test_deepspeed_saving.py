"""A checkpoint of DeepSpeed that a killed rank left incomplete is not found: the one before is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")

from tests.integrations.deepspeed_jobs import run_ranks  # noqa: E402
from wf_backends.checkpoints import complete, find_checkpoint  # noqa: E402
from wf_deepspeed.saving import make_checkpoints_atomic  # noqa: E402

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


class Engine:
    """What `make_checkpoints_atomic` uses of DeepSpeed's engine; it writes and reads one file."""

    global_steps = 3
    checkpoint_engine = SimpleNamespace(is_decoupled=lambda: False)

    def use_node_local_storage(self) -> bool:
        return False

    load_universal_checkpoint = use_node_local_storage

    def save_checkpoint(self, save_dir: str, tag: str, *_: Any) -> bool:
        return bool(Path(save_dir, tag, "states.txt").write_text("saved"))

    def load_checkpoint(self, load_dir: str, tag: str) -> str:
        return Path(load_dir, tag, "states.txt").read_text()


@pytest.mark.parametrize("tag", ["run1/step100", 7, None])
def test_any_tag_of_deepspeed_is_saved_and_loaded(tag: object, tmp_path: Path) -> None:
    engine: Any = Engine()
    make_checkpoints_atomic(engine, SimpleNamespace(set=setattr))  # type: ignore[arg-type]
    engine.save_checkpoint(str(tmp_path), tag)
    assert engine.load_checkpoint(str(tmp_path), tag) == "saved"
    assert engine.load_checkpoint(str(tmp_path)) == "saved"
    assert not [*tmp_path.glob("*.part")]
