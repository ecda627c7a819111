"""The real SFTTrainer of TRL, spread by wf_accelerate, trains as without. Needs transformers 5."""

from __future__ import annotations

from typing import Any

import pytest

REASON = "TRL with a fused LM head is not installed"
pytest.importorskip("trl", minversion="1.16", reason=REASON, exc_type=ImportError)

from tests.integrations.accelerate_jobs import Results  # noqa: E402
from tests.integrations.trl_jobs import CONCENTRIC, trained  # noqa: E402

PAIRS = {"sequence_parallel_size": 2}
CASES: dict[str, dict[str, Any]] = {
    "sft": {"packed": False, "words": CONCENTRIC},
    "sft_groups": {"packed": False, "words": PAIRS},
    "packed": {"packed": True, "words": PAIRS},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Results]:
    """With us, and without."""
    return trained("trl_worker", CASES, tmp_path_factory.mktemp("trl"))


@pytest.mark.processes
@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_without_us(name: str, found: tuple[Results, Results]) -> None:
    """Losses, gradient norms, entropies, accuracies, and the tokens that were counted."""
    ours, plain = (results[name] for results in found)
    assert len(ours["steps"]) == len(plain["steps"]) == 4 and ours["sent"]
    both = ([*one["steps"], one["eval"]] for one in (ours, plain))
    for one, its in zip(*both, strict=True):
        assert set(one) == set(its)
        for key in its:
            assert one[key] == pytest.approx(its[key], rel=1e-4, abs=1e-4), key
