"""TRL's real trainers of preferences, rewards and policies train with WallFacer as without it.

Jobs of four gloo ranks, of TRL 0.19 and, where transformers 5 is installed, of TRL 1.16, whose
trainers have a fused LM head.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed", exc_type=ImportError)

from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import GenerationConfig  # noqa: E402
from trl import DPOConfig, GRPOConfig, LogCompletionsCallback, RLOOTrainer  # noqa: E402

import wf_accelerate  # noqa: E402
from tests.integrations.accelerate_jobs import Results  # noqa: E402
from tests.integrations.deepspeed_jobs import tiny_llama  # noqa: E402
from tests.integrations.trl_jobs import (  # noqa: E402
    CONCENTRIC,
    HAS_FUSED_HEAD,
    has,
    is_experimental,
    run_trl,
    taken,
)
from tests.long import selected_cases  # noqa: E402
from wf_backends import SequenceParallel, SequenceParallelConfig  # noqa: E402
from wf_transformers import Handle, attach_model  # noqa: E402
from wf_transformers.comparison.changes import Changes  # noqa: E402
from wf_transformers.whole_batches.log_probabilities import CALLERS, generate_alone  # noqa: E402
from wf_transformers.whole_batches.trl_trainers import connect_trl, set_generation_batch  # noqa: E402

TWO_GROUPS = {"sequence_parallel_size": 2, "route": "ring"}
ACCUMULATION = {"gradient_accumulation_steps": 2}
GENERATIONS = {"num_generations": 4, "gradient_accumulation_steps": 2}
OVER_GROUPS = {"num_generations": 4, "top_entropy_quantile": 0.9, "scale_rewards": "batch"}
"""Completions of a prompt in both groups; a quantile and a deviation over the samples of both."""
DPO_AND_SFT_LOSS = taken(DPOConfig, rpo_alpha=0.5) or {
    "loss_type": ["sigmoid", "sft"],
    "loss_weights": [1.0, 0.5],
}


def case(
    trainer: str, wallfacer: dict[str, Any], options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A case of preference_worker.py; `options` are those of the trainer's configuration."""
    return {"trainer": trainer, "wallfacer": wallfacer, "options": options or {}}


CASES = {
    "dpo": case("dpo", CONCENTRIC),
    "dpo_groups": case("dpo", TWO_GROUPS, DPO_AND_SFT_LOSS | ACCUMULATION),
    "dpo_lora": case("dpo_lora", TWO_GROUPS),
    "grpo": case("grpo", CONCENTRIC, {"beta": 0.1} | GENERATIONS),
    "grpo_groups": case("grpo", TWO_GROUPS, {"num_iterations": 2, "num_generations": 4}),
    "kto": case("kto", CONCENTRIC),
    "reward": case("reward", CONCENTRIC),
    "reward_groups": case("reward", TWO_GROUPS, {"center_rewards_coefficient": 0.1}),
}
if hasattr(RLOOTrainer, "_get_per_token_logps_and_entropies"):
    CASES["rloo"] = case(
        "rloo", TWO_GROUPS, {"beta": 0.1, "normalize_advantages": True} | GENERATIONS
    )
if taken(GRPOConfig, **OVER_GROUPS) == OVER_GROUPS:
    CASES["grpo_over_groups"] = case("grpo", TWO_GROUPS, OVER_GROUPS)
if has("orpo"):
    CASES |= {
        "orpo": case("orpo", CONCENTRIC),
        "cpo": case("cpo", TWO_GROUPS, ACCUMULATION),
    }


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Results, Results]:
    """(with WallFacer, without it)."""
    cases = {name: CASES[name] for name in selected_cases(request, CASES)}
    return run_trl("preference_worker", cases, tmp_path_factory.mktemp("trl"))


@pytest.mark.processes
@pytest.mark.parametrize("name", CASES)
def test_a_trl_trainer_trains_as_without_wallfacer(
    name: str, results: tuple[Results, Results]
) -> None:
    """In its losses and in the change of the parameters over three steps of SGD.

    To 1e-9 in float64; TRL's fused head computes in float32 for any dtype of the model: 1e-6.
    """
    actual, expected = (result[name] for result in results)
    assert actual["bytes_sent"]
    tolerance = 1e-6 if HAS_FUSED_HEAD and "reward" not in name else 1e-9
    assert actual["losses"] == pytest.approx(expected["losses"], rel=tolerance, abs=1e-12)
    change, expected_change = (
        torch.tensor(result["parameter_change"], dtype=torch.float64)
        for result in (actual, expected)
    )
    largest = expected_change.abs().max()
    assert largest > 0
    assert (change - expected_change).abs().max() < tolerance * largest


@pytest.mark.processes
@pytest.mark.parametrize("name", ["dpo", "dpo_groups"])
def test_a_dpo_trainer_evaluates_as_without_wallfacer(
    name: str, results: tuple[Results, Results]
) -> None:
    """In its loss, and in rewards, log-probabilities and accuracies, which TRL keeps in float32.

    With TRL 1.16 also in a metric of whole logits.
    """
    actual, expected = (result[name]["eval"] for result in results)
    assert ("eval_first_logits" in expected) == HAS_FUSED_HEAD
    assert {"eval_loss", "eval_rewards/chosen", "eval_logps/rejected"} <= expected.keys()
    assert actual == pytest.approx(expected, rel=1e-5, abs=1e-6)


def one_step(folder: Path) -> dict[str, Any]:
    """Arguments of a trainer in one process."""
    return {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 2,
        "max_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
    }


def make_grpo_trainer(folder: Path, **options: Any) -> Any:
    """A GRPOTrainer in one process, with four completions for each prompt."""
    from tests.integrations import preference_worker

    return preference_worker.grpo(one_step(folder), GENERATIONS | options)


def test_precomputed_log_probabilities_of_a_reference_train_as_computed_ones(
    tmp_path: Path,
) -> None:
    """TRL 1.16 computes them when the trainer is made, by loaders that accelerate prepares."""
    from tests.integrations import preference_worker

    losses = []
    for precompute in (True, False):
        options = {"precompute_ref_log_probs": precompute}
        trainer = preference_worker.dpo(one_step(tmp_path), options)
        with wf_accelerate.connect_trainer(trainer, {"sequence_parallel_size": 1}):
            trainer.train()
        losses += trainer.losses
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_generation_batch_of_incomplete_prompts_is_refused(tmp_path: Path) -> None:
    """TRL counts those of all ranks, and those of a sequence are the same."""
    trainer = make_grpo_trainer(tmp_path)
    trainer.args.generation_batch_size = 4
    with pytest.raises(ValueError, match=r"= 2 must be a multiple of num_generations = 4"):
        set_generation_batch(trainer, 2, ExitStack())


@pytest.mark.parametrize(("batch", "refused"), [(2, False), (3, True)])
def test_an_evaluation_has_completions_of_its_own_number(
    tmp_path: Path, batch: int, refused: bool
) -> None:
    """TRL 1.16's `num_generations_eval`; in training there are 4 for each prompt."""
    trainer = make_grpo_trainer(tmp_path)
    trainer.eval_dataset = trainer.train_dataset
    trainer.args.num_generations_eval, trainer.args.per_device_eval_batch_size = 2, batch
    message = r"eval_batch_size x .* = 3 must be a multiple of num_generations_eval = 2"
    with pytest.raises(ValueError, match=message) if refused else nullcontext():
        set_generation_batch(trainer, 1, ExitStack())


def test_an_evaluation_of_other_data_may_not_split_completions_of_a_prompt(tmp_path: Path) -> None:
    """The data that the trainer had when it was connected is checked there."""
    trainer = make_grpo_trainer(tmp_path)
    trainer.args.per_device_eval_batch_size = 3
    with wf_accelerate.connect_trainer(trainer, {"sequence_parallel_size": 1}):
        with pytest.raises(ValueError, match=r"= 3 must be a multiple of num_generations = 4"):
            trainer.evaluate(trainer.train_dataset)


def test_vllm_is_refused(tmp_path: Path) -> None:
    trainer = make_grpo_trainer(tmp_path)
    trainer.use_vllm = True
    with pytest.raises(NotImplementedError, match="use_vllm=True"):
        wf_accelerate.connect_trainer(trainer, {"sequence_parallel_size": 1})


@pytest.mark.parametrize(("method", "name"), [("gkd", "GKD"), ("online_dpo", "OnlineDPO")])
def test_a_trainer_that_generates_in_a_way_of_its_own_is_refused(method: str, name: str) -> None:
    """Before it trains: its model's `generate` would end at the first step."""
    package = f"trl.experimental.{method}" if is_experimental(method) else "trl.trainer"
    trainer_class = getattr(import_module(f"{package}.{method}_trainer"), f"{name}Trainer")
    trainer = object.__new__(type("Mine", (trainer_class,), {}))
    trainer.args, trainer.model = SimpleNamespace(n_gpu=1), tiny_llama()
    with pytest.raises(NotImplementedError, match="Mine generates completions in training"):
        wf_accelerate.connect_trainer(trainer, {"sequence_parallel_size": 1})


def test_a_mean_over_tokens_beside_a_loss_of_its_own_is_refused(tmp_path: Path) -> None:
    """DeepSpeed's block has the option, and would not heed it."""
    handle = Handle(SequenceParallel(SequenceParallelConfig(sequence_parallel_size=1)))
    handle.averages_tokens = True
    with pytest.raises(NotImplementedError, match='"loss_average": "token" with Recording'):
        connect_trl(make_grpo_trainer(tmp_path), handle)


def test_remove_restores_a_grpo_trainer(tmp_path: Path) -> None:
    trainer = make_grpo_trainer(tmp_path, beta=0.1)  # with beta there is a reference model
    from_logits = {name for name in CALLERS if hasattr(trainer, name)}
    methods = {"evaluation_loop", "prediction_step", "compute_loss"} | from_logits
    batch_size = trainer.args.generation_batch_size
    with wf_accelerate.connect_trainer(trainer, {"sequence_parallel_size": 1}):
        assert from_logits and {"evaluation_loop"} | from_logits <= set(vars(trainer))
        assert "generate" in vars(trainer.model)
        assert trainer.ref_model._forward_pre_hooks
    assert not methods & set(vars(trainer))
    assert "generate" not in vars(trainer.model) and not trainer.ref_model._forward_pre_hooks
    assert trainer.args.generation_batch_size == batch_size


def test_a_callback_of_trl_generates_as_the_trainer_trains(tmp_path: Path) -> None:
    """On each rank by itself, with a KV cache, which is not spread over ranks."""
    from tests.integrations import preference_worker

    trainer = preference_worker.dpo(one_step(tmp_path), {})
    trainer.processing_class.model_input_names = ["input_ids", "attention_mask"]
    options = GenerationConfig(max_new_tokens=4, pad_token_id=0)
    callback = LogCompletionsCallback(trainer, options, num_prompts=2, freq=1)
    trainer.add_callback(callback)
    with wf_accelerate.connect_trainer(trainer, {"sequence_parallel_size": 1}):
        trainer.train()
    assert len(callback.table) == 2


def test_a_rollout_generates_without_an_adapter_that_is_disabled() -> None:
    """As the reference's samples of DPO with `generate_during_eval=True` and an adapter."""
    ids, options = torch.arange(5, 13)[None], {"max_new_tokens": 8, "do_sample": False}
    base = tiny_llama().generate(ids, **options)
    adapter = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(tiny_llama(), adapter)
    changes = Changes(model)
    with changes.recorded():
        handle = attach_model(model, SequenceParallel(SequenceParallelConfig()))
    with handle:
        generate_alone(model, handle, changes)
        assert not torch.equal(model.generate(input_ids=ids, **options), base)
        with model.disable_adapter():
            assert torch.equal(model.generate(input_ids=ids, **options), base)
