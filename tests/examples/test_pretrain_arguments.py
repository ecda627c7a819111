"""The command line of examples/pretrain.py, and the JSON of its engine in plain torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("rich")

ROOT = Path(__file__).parents[2]
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "examples")
    from engine_torch import _read_config
    from pretrain import CONFIGS, parse_arguments


@pytest.mark.parametrize("engine", CONFIGS)
def test_each_engine_has_a_configuration_of_its_own(engine: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["pretrain.py", "--engine", engine])
    config = ROOT / parse_arguments().config
    assert config.is_file() and config.parent.name == engine


def test_a_negative_interval_of_checkpoints_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.argv", ["pretrain.py", "--save-every", "-1"])
    with pytest.raises(SystemExit):
        parse_arguments()
    assert "--save-every must be at least 0, got -1" in capsys.readouterr().err


def test_an_accumulation_of_no_batches_is_refused(tmp_path: Path):
    settings = {"wallfacer": {"sequence_parallel_size": 1}, "accumulation": 0}
    (tmp_path / "torch.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match='"accumulation" must be a positive integer, got 0'):
        _read_config(str(tmp_path / "torch.json"))
