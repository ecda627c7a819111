"""TRL's real SFTTrainer trains with WallFacer as without it, in jobs of four gloo ranks.

Of TRL 0.19, whose accuracies are made of logits, and of TRL 1.16, which has a fused LM head.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL is not installed", exc_type=ImportError)

from tests.integrations.accelerate_jobs import Results  # noqa: E402
from tests.integrations.trl_jobs import CONCENTRIC, run_trl  # noqa: E402

TWO_GROUPS = {"sequence_parallel_size": 2}
CASES: dict[str, dict[str, Any]] = {
    "sft": {"packed": False, "wallfacer": CONCENTRIC},
    "sft_groups": {"packed": False, "wallfacer": TWO_GROUPS},
    "packed": {"packed": True, "wallfacer": TWO_GROUPS},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Results]:
    """(with WallFacer, without it)."""
    return run_trl("trl_worker", CASES, tmp_path_factory.mktemp("trl"))


@pytest.mark.processes
@pytest.mark.parametrize("name", CASES)
def test_sft_trains_and_evaluates_as_without_wallfacer(
    name: str, results: tuple[Results, Results]
) -> None:
    """In losses, gradient norms, entropies, accuracies and numbers of tokens, logged as rounded."""
    actual, expected = (result[name] for result in results)
    assert len(actual["steps"]) == len(expected["steps"]) == 4
    assert actual["bytes_sent"]
    logs = ([*result["steps"], result["eval"]] for result in (actual, expected))
    for metrics, expected_metrics in zip(*logs, strict=True):
        assert set(metrics) == set(expected_metrics)
        for key, value in expected_metrics.items():
            assert metrics[key] == pytest.approx(value, rel=1e-4, abs=1e-4), key
