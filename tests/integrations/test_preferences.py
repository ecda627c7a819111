"""TRL's real trainers of preferences and policies, spread, train as without us, in float64.

Of TRL 0.19 and, where transformers 5 is installed, of 1.16, whose trainers have a fused LM head.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed", exc_type=ImportError)

import wf_accelerate  # noqa: E402
from tests.integrations.accelerate_jobs import Results  # noqa: E402
from tests.integrations.trl_jobs import CONCENTRIC, trained  # noqa: E402
from tests.long import selected_cases  # noqa: E402

PAIRS = {"sequence_parallel_size": 2, "route": "ring"}
TWO = {"gradient_accumulation_steps": 2}
HAS_FUSED_HEAD = int(version("trl").split(".")[0]) > 0
GROUP = {"num_generations": 4, "gradient_accumulation_steps": 2}
TWO_LOSSES: dict[str, Any] = {"rpo_alpha": 0.5}
if HAS_FUSED_HEAD:
    TWO_LOSSES = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}
CASES: dict[str, dict[str, Any]] = {
    "dpo": {"kind": "dpo", "words": CONCENTRIC, "options": {}},
    "dpo_groups": {"kind": "dpo", "words": PAIRS, "options": TWO_LOSSES | TWO},
    "dpo_lora": {"kind": "dpo_lora", "words": PAIRS, "options": {}},
    "grpo": {"kind": "grpo", "words": CONCENTRIC, "options": {"beta": 0.1} | GROUP},
    "grpo_groups": {"kind": "grpo", "words": PAIRS, "options": {"num_iterations": 2} | GROUP},
    "reward": {"kind": "reward", "words": CONCENTRIC, "options": {}},
    "reward_groups": {
        "kind": "reward",
        "words": PAIRS,
        "options": {"center_rewards_coefficient": 0.1},
    },
}
if HAS_FUSED_HEAD:
    CASES |= {
        "rloo": {"kind": "rloo", "words": PAIRS, "options": {"beta": 0.1} | GROUP},
        "kto": {"kind": "kto", "words": CONCENTRIC, "options": {}},
    }


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Results, Results]:
    """With us, and without."""
    asked = {name: CASES[name] for name in selected_cases(request, CASES)}
    return trained("preference_worker", asked, tmp_path_factory.mktemp("trl"))


@pytest.mark.processes
@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_without_us(name: str, found: tuple[Results, Results]) -> None:
    """Losses, and what the parameters moved by."""
    ours, plain = (results[name] for results in found)
    assert ours["sent"]
    in_float32 = HAS_FUSED_HEAD and "reward" not in name  # whatever the model's dtype
    error = 1e-6 if in_float32 else 1e-9
    assert ours["losses"] == pytest.approx(plain["losses"], rel=error, abs=1e-12)
    mine, its = (torch.tensor(one["moved"], dtype=torch.float64) for one in (ours, plain))
    assert (mine - its).abs().max() < error * its.abs().max() and its.abs().max() > 0


GROUPED = {"num_generations": 4, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}


def policy_trainer(folder: Path, **words: Any) -> Any:
    """GRPO's, in one process."""
    from tests.integrations import preference_worker

    settings = {"output_dir": str(folder / "out"), "use_cpu": True, "bf16": False, "report_to": []}
    return preference_worker.grpo(settings | {"max_steps": 1}, GROUPED | words)


def test_completions_of_a_prompt_on_several_sequences_are_refused(tmp_path: Path) -> None:
    trainer = policy_trainer(tmp_path)
    trainer.args.steps_per_generation = 1  # of several processes: two rows of four each
    with pytest.raises(ValueError, match=r"= 2 must be a multiple of num_generations = 4"):
        wf_accelerate.connect_trainer(trainer, {"sequence_parallel_size": 1})


def test_vllm_is_refused(tmp_path: Path) -> None:
    trainer = policy_trainer(tmp_path)
    trainer.use_vllm = True
    with pytest.raises(NotImplementedError, match="use_vllm=True"):
        wf_accelerate.connect_trainer(trainer, {"sequence_parallel_size": 1})


def test_everything_is_put_back(tmp_path: Path) -> None:
    trainer = policy_trainer(tmp_path, beta=0.1)
    names = ["_calculate_rewards", "prediction_step", "compute_loss"]
    names += [] if HAS_FUSED_HEAD else ["_get_per_token_logps"]
    batch_size = trainer.args.generation_batch_size
    with wf_accelerate.connect_trainer(trainer, {"sequence_parallel_size": 1}):
        assert HAS_FUSED_HEAD or "_get_per_token_logps" in vars(trainer)
        assert "_calculate_rewards" in vars(trainer) and "generate" in vars(trainer.model)
        assert len(trainer.ref_model._forward_pre_hooks)
    assert not any(name in vars(trainer) for name in names)
    assert "generate" not in vars(trainer.model) and not trainer.ref_model._forward_pre_hooks
    assert trainer.args.generation_batch_size == batch_size
