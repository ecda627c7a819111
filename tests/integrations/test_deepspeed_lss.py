""" "strategy": "lss" in a DeepSpeed JSON: two ranks train as one at ZeRO 0 to 3."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed", exc_type=ImportError)
pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

from tests.integrations.deepspeed_cases import STAGES, assert_same_training, case  # noqa: E402
from tests.integrations.deepspeed_jobs import run_cases  # noqa: E402

pytestmark = [pytest.mark.deepspeed, pytest.mark.processes]

LSS = {"sequence_parallel_size": 2, "strategy": "lss"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("lss")
    reference = run_cases([case("one_rank", None)], 1, folder)
    return reference | run_cases([case(f"lss_{stage}", LSS, stage) for stage in STAGES], 2, folder)


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_train_as_one(stage: int, results: dict[str, dict[str, Any]]) -> None:
    """And exchange what LSS says: keys and values gathered once, their gradients reduced once."""
    actual = results[f"lss_{stage}"]
    assert_same_training(actual, results["one_rank"])
    assert actual["sent"] > 0
    assert actual["message_labels"] == ["backward reduce", "forward gather"]
