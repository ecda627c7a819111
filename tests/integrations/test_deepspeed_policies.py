"""TRL's policies and preferences under DeepSpeed's block train as under DDP without WallFacer.

The script has no line of ours: jobs of four gloo ranks, two sequences on two each, in float32.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed", exc_type=ImportError)
pytest.importorskip("trl", reason="TRL is not installed", exc_type=ImportError)

from trl import GRPOConfig, RLOOTrainer  # noqa: E402

from tests.integrations.accelerate_jobs import Results  # noqa: E402
from tests.integrations.deepspeed_jobs import tiny_llama  # noqa: E402
from tests.integrations.trl_jobs import RELEASE, is_experimental, run_trl  # noqa: E402
from tests.long import selected_cases  # noqa: E402
from wf_deepspeed import trainers  # noqa: E402
from wf_transformers.whole_batches import trl_trainers  # noqa: E402

pytestmark = pytest.mark.deepspeed

RING = {"sequence_parallel_size": 2, "route": {"name": "ring"}}
GENERATIONS = {"num_generations": 4, "gradient_accumulation_steps": 2}
REUSED = GENERATIONS | {"beta": 0.1, "num_iterations": 2}
AT_ONCE = {"per_device_train_batch_size": 4}  # no accumulation
SLOW = {"learning_rate": 1e-2}  # RLOO's gradients are a hundred times as large
NOT_COMPARED = ("logits/", "grad_norm")
"""Parts of names in TRL's logs: of means of logits that cover padding (ORPO's), and of what
DeepSpeed lacks at ZeRO 0."""


def case(trainer: str, zero: int, options: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    """A case of policy_worker.py; its reference runs under DDP."""
    described = {"trainer": trainer, "zero": zero, "options": options, "arguments": arguments}
    return described | {"wallfacer": RING, "reference": {"zero": None}}


CASES = {
    "grpo_zero0": case("grpo", 0, {"num_generations": 4}, **AT_ONCE),
    "grpo_zero1": case("grpo", 1, REUSED),
    "grpo_zero2": case("grpo", 2, {"num_generations": 4}, eval_on_start=True, **AT_ONCE),
    "grpo_zero3": case("grpo", 3, REUSED),
    "grpo_layer_by_layer": case(
        "grpo", 3, GENERATIONS | {"ds3_gather_for_generation": False}, gradient_checkpointing=True
    ),
}
if hasattr(GRPOConfig, "top_entropy_quantile"):
    CASES["grpo_entropy"] = case(
        "grpo", 2, GENERATIONS | {"top_entropy_quantile": 0.9, "log_completions": True}
    )
if hasattr(RLOOTrainer, "_get_per_token_logps_and_entropies"):
    CASES |= {
        "rloo_zero0": case("rloo", 0, REUSED, **SLOW),
        "rloo_zero2": case("rloo", 2, {"num_generations": 4, "beta": 0.1}, **AT_ONCE, **SLOW),
        "rloo_zero3": case("rloo", 3, REUSED, **SLOW),
    }
if RELEASE < (0, 29):
    CASES |= {
        "dpo_zero2": case("dpo", 2, {"rpo_alpha": 0.5, "gradient_accumulation_steps": 2}),
        "dpo_zero3": case("dpo", 3, {}),
        "orpo_zero3": case("orpo", 3, {}),
        "sft_zero2": case("sft", 2, {"gradient_accumulation_steps": 2}),
        "sft_zero3": case("sft", 3, {}),
    }


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Results, Results]:
    """(under DeepSpeed's block, under DDP without WallFacer)."""
    cases = {name: CASES[name] for name in selected_cases(request, CASES)}
    return run_trl("policy_worker", cases, tmp_path_factory.mktemp("policies"))


@pytest.mark.processes
@pytest.mark.parametrize("name", CASES)
def test_a_trl_trainer_trains_and_evaluates_as_without_wallfacer(
    name: str, results: tuple[Results, Results]
) -> None:
    """In losses and logs (rewards, KL divergences, lengths), in the change of the parameters over
    three steps of SGD, and in an evaluation with a rollout of its own."""
    actual, expected = (result[name] for result in results)
    assert actual["bytes_sent"]
    assert actual["losses"] == pytest.approx(expected["losses"], rel=1e-5, abs=2e-6)
    assert "eval_loss" in expected["logs"][-1]
    for log, expected_log in zip(actual["logs"], expected["logs"], strict=True):
        assert compared(log) == pytest.approx(compared(expected_log), rel=1e-4, abs=1e-4)
    change, expected_change = (
        torch.tensor(result["parameter_change"]) for result in (actual, expected)
    )
    largest = expected_change.abs().max()
    assert largest > 1e-2
    assert (change - expected_change).abs().max() < 2e-5 * largest


def compared(log: dict[str, float]) -> dict[str, float]:
    return {k: x for k, x in log.items() if not any(part in k for part in NOT_COMPARED)}


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the JSON of this process had a block for two ranks."""
    monkeypatch.setattr(trainers, "sequence_parallel_size", lambda: 2)


@pytest.mark.usefixtures("two_ranks")
def test_an_evaluation_of_a_policy_before_its_training_is_refused() -> None:
    trainer = SimpleNamespace(model=tiny_llama(), num_generations=4)
    with pytest.raises(NotImplementedError, match=r"evaluate\(\) before train\(\).*eval_on_start"):
        trainers.METHODS["evaluation_loop"](trainer, lambda *_: None)


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("method", ["train", "create_optimizer_and_scheduler"])
def test_a_trainer_that_generates_in_a_way_of_its_own_is_refused(method: str) -> None:
    """Before its loaders; nothing would make its ranks draw alike. RLOO and PPO of TRL 0.19 have a
    `train` of their own, and call the other method when they are made."""
    package = "trl.experimental.online_dpo" if is_experimental("online_dpo") else "trl.trainer"
    trainer_class = import_module(f"{package}.online_dpo_trainer").OnlineDPOTrainer
    trainer = object.__new__(type("Mine", (trainer_class,), {}))
    trainer.model = tiny_llama()
    with pytest.raises(NotImplementedError, match="Mine generates completions in training"):
        trainers.METHODS[method](trainer, lambda *_: None)


@pytest.mark.usefixtures("two_ranks")
def test_vllm_is_refused_under_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = object.__new__(import_module("trl").GRPOTrainer)
    trainer.model, trainer.ref_model, trainer.use_vllm = tiny_llama(), None, True
    # It was not made.
    monkeypatch.setattr(trl_trainers, "makes_log_probabilities", lambda _: True)
    with pytest.raises(NotImplementedError, match="use_vllm=True"):
        trainers.METHODS["train"](trainer, lambda *_: None)
