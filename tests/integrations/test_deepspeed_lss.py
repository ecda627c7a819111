"""LSS Transformer from the DeepSpeed block: ZeRO 0 to 3 train as one rank does."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed", exc_type=ImportError)
pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

from tests.integrations.deepspeed_jobs import run_cases  # noqa: E402
from tests.integrations.test_deepspeed_exact import STAGES, assert_same, case  # noqa: E402

pytestmark = [pytest.mark.deepspeed, pytest.mark.processes]

LSS = {"sequence_parallel_size": 2, "strategy": "lss"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("lss")
    alone = run_cases([case("alone", None)], 1, folder)
    return alone | run_cases([case(f"lss_{stage}", LSS, stage) for stage in STAGES], 2, folder)


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_train_as_one(stage: int, found: dict[str, dict[str, Any]]) -> None:
    assert_same(found[f"lss_{stage}"], found["alone"])
    assert found[f"lss_{stage}"]["sent"] > 0
    assert found[f"lss_{stage}"]["labels"] == ["backward home", "forward gather"]
