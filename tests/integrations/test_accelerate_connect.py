"""`wf_accelerate.connect` and `connect_trainer`: what `remove()` restores, and what is refused.

Without a job of several ranks; the trained results are compared in test_accelerate.py.
"""

from __future__ import annotations

import sys
from copy import deepcopy
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

pytest.importorskip("accelerate", reason="accelerate is not installed", exc_type=ImportError)
pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

import accelerate.accelerator  # noqa: E402
import accelerate.scheduler  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from transformers import (  # noqa: E402
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)

import wf_accelerate  # noqa: E402
from tests.integrations.deepspeed_jobs import VOCABULARY, tiny_llama  # noqa: E402
from tests.integrations.transformers_models import batch  # noqa: E402
from wf_transformers import Handle  # noqa: E402


def test_connect_gives_the_handle_of_the_model() -> None:
    with wf_accelerate.connect(
        tiny_llama(), Accelerator(cpu=True), {"sequence_parallel_size": 1}
    ) as handle:
        assert isinstance(handle, Handle) and handle.sp.size == 1
        assert handle.checkpoint_kwargs and handle.report() == {}


def test_remove_restores_the_model_and_the_accelerator() -> None:
    accelerator, model = Accelerator(cpu=True), tiny_llama()
    attributes, functions = dict(vars(accelerator)), dict(vars(accelerate.accelerator))
    ids = batch()["input_ids"] % VOCABULARY
    expected = model(ids, labels=ids).loss
    with wf_accelerate.connect(model, accelerator, {"sequence_parallel_size": 1}):
        assert model(ids, labels=ids).loss.item() == pytest.approx(expected.item(), rel=1e-6)
        added = set(vars(accelerator)) - set(attributes)
        methods = {"prepare_data_loader", "prepare_scheduler", "_prepare_deepspeed"}
        assert added == methods | {"load_state", "gather_for_metrics", "wallfacer_groups"}
    assert vars(accelerator) == attributes and vars(accelerate.accelerator) == functions
    assert not model._forward_pre_hooks and not model._forward_hooks


def test_a_connected_model_generates_as_without_us() -> None:
    """With a KV cache, in a loop or a callback that `connect` cannot know."""
    model, ids = tiny_llama(), batch()["input_ids"] % VOCABULARY
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    for connected in (model, torch.nn.ModuleDict({"policy": model})):
        with wf_accelerate.connect(connected, Accelerator(cpu=True), {"sequence_parallel_size": 1}):
            assert torch.equal(model.generate(ids, **options), expected)


def test_a_connected_model_can_be_copied_to_average_its_weights() -> None:
    model, ids = tiny_llama(), batch()["input_ids"] % VOCABULARY
    with wf_accelerate.connect(model, Accelerator(cpu=True), {"sequence_parallel_size": 1}):
        expected = model(ids, labels=ids).loss.item()
        average = deepcopy(model)
        for parameter in model.parameters():
            parameter.data.zero_()
        assert average(ids, labels=ids).loss.item() == expected


def fake_accelerator(distributed_type: str = "MULTI_GPU", **attributes: Any) -> Any:
    """The attributes of an Accelerator that `connect` checks first."""
    defaults = {
        "distributed_type": SimpleNamespace(value=distributed_type),
        "_models": [],
        "_dataloaders": [],
        "num_processes": 1,
    }
    return SimpleNamespace(**defaults | attributes)


@pytest.mark.parametrize(
    ("accelerator", "config", "error", "message"),
    [
        (fake_accelerator("DEEPSPEED"), {}, NotImplementedError, "python -m wf_deepspeed"),
        (
            fake_accelerator("MULTI_CPU", deepspeed_engine_wrapped=None),
            {},
            ValueError,
            "DeepSpeed configuration, which cpu=True leaves out",
        ),
        (fake_accelerator("MEGATRON_LM"), {}, NotImplementedError, "MEGATRON_LM"),
        (fake_accelerator(_models=[1]), {}, ValueError, "before accelerator.prepare"),
        (fake_accelerator(_dataloaders=[1]), {}, ValueError, "before accelerator.prepare"),
        (
            fake_accelerator(num_processes=4),
            {},
            ValueError,
            "counts 4 processes, the job has 1 ranks",
        ),
        (fake_accelerator(), {"sequence_paralel_size": 2}, ValueError, "sequence_parallel_size"),
        (fake_accelerator(), 4, ValueError, "a SequenceParallelConfig or a dict, got 4"),
        (fake_accelerator(), {"verfy": False}, ValueError, "'verfy'; did you mean 'verify'"),
        (fake_accelerator(), {"sequence_parallel_size": 2}, ValueError, "must divide the 1 ranks"),
        (
            fake_accelerator(parallelism_config=SimpleNamespace(non_data_parallel_size=2)),
            {},
            NotImplementedError,
            "leave parallelism_config out",
        ),
    ],
)
def test_an_accelerator_or_config_that_cannot_be_used_is_refused(
    accelerator: Any, config: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        wf_accelerate.connect(tiny_llama(), accelerator, config)


def test_a_model_whose_forward_was_replaced_is_refused() -> None:
    model = tiny_llama()
    model.forward = lambda *_, **__: None
    with pytest.raises(NotImplementedError, match="forward of this LlamaForCausalLM was replaced"):
        wf_accelerate.connect(model, fake_accelerator(), {})


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"model_init": tiny_llama}, "give model="),
        ({"args": SimpleNamespace(n_gpu=8)}, "--nproc-per-node 8"),
        (
            {"args": SimpleNamespace(n_gpu=1, use_legacy_prediction_loop=True)},
            "use_legacy_prediction_loop=True",
        ),
        ({"model": None}, "no model"),
    ],
)
def test_a_trainer_that_cannot_be_connected_is_refused(
    attributes: dict[str, Any], message: str
) -> None:
    defaults = {"args": SimpleNamespace(n_gpu=1), "model": tiny_llama(), "model_init": None}
    trainer: Any = SimpleNamespace(**defaults | attributes, accelerator=fake_accelerator())
    with pytest.raises((ValueError, NotImplementedError), match=message):
        wf_accelerate.connect_trainer(trainer, {})


def test_whole_logits_are_those_of_an_evaluation_without_predictions_too(tmp_path: Path) -> None:
    """TRL 0.19's SFTTrainer reads them there, beside the labels."""
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = Trainer(tiny_llama(), arguments, eval_dataset=[])
    inputs = batch(1, 12)
    with (
        wf_accelerate.connect_trainer(trainer, {"sequence_parallel_size": 1}, whole_logits=True),
        patch.object(trainer, "compute_loss", return_value=(torch.zeros(()), {})) as compute_loss,
    ):
        trainer.prediction_step(trainer.model, inputs, prediction_loss_only=True)
    assert "whole_logits" not in compute_loss.call_args.args[1]


def test_a_compute_loss_of_a_subclass_is_replaced(tmp_path: Path) -> None:
    """It may multiply by the number of processes, as TRL's SFTTrainer does."""

    class OwnTrainer(Trainer):
        def compute_loss(self, *_: Any, **__: Any) -> Any: ...

    trainer = OwnTrainer(tiny_llama(), TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    with wf_accelerate.connect_trainer(trainer, {"sequence_parallel_size": 1}):
        assert {"compute_loss", "get_batch_samples", "training_step"} <= vars(trainer).keys()
    assert "compute_loss" not in vars(trainer)


def test_a_trainer_of_a_file_that_python_does_not_list_is_connected(tmp_path: Path) -> None:
    """As if loaded by importlib from its path, or sent by cloudpickle."""
    mine: Any = type("Mine", (Trainer,), {"__module__": "not_in_sys_modules"})
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = mine(tiny_llama(), arguments)
    wf_accelerate.connect_trainer(trainer, {"sequence_parallel_size": 1}).remove()


def test_a_trainer_of_trl_may_ask_for_entropies_of_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the SFTTrainer from TRL 0.22 to 1.14, of which no release is installed for the tests."""
    file: Any = ModuleType("trl.of_this_test")
    file.entropy_from_logits = lambda logits: torch.distributions.Categorical(
        logits=logits
    ).entropy()
    monkeypatch.setitem(sys.modules, file.__name__, file)
    entropies: list[Tensor] = []

    def compute_loss(self: Any, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
        outputs = model(**inputs)
        entropies.append(file.entropy_from_logits(outputs.logits[..., :-1, :].detach()))
        return outputs.loss

    mine: Any = type(
        "Mine", (Trainer,), {"__module__": file.__name__, "compute_loss": compute_loss}
    )
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], max_steps=1)
    ids = batch(1, 12)["input_ids"][0] % VOCABULARY
    trainer = mine(tiny_llama(), arguments, train_dataset=[{"input_ids": ids, "labels": ids}])
    expected = file.entropy_from_logits(trainer.model(ids[None]).logits[:, :-1]).detach()
    with wf_accelerate.connect_trainer(trainer, {"sequence_parallel_size": 1}):
        trainer.train()
    assert entropies
    for actual in entropies:
        torch.testing.assert_close(actual, expected)


def generating_trainer(folder: Path) -> Any:
    """A Trainer whose evaluation generates tokens for each sample."""
    arguments = Seq2SeqTrainingArguments(
        str(folder), use_cpu=True, report_to=[], predict_with_generate=True
    )
    return Seq2SeqTrainer(tiny_llama(pad_token_id=0), arguments)


def test_a_trainer_evaluates_what_its_model_generates(tmp_path: Path) -> None:
    """A KV cache cannot be spread: each rank generates with the model as it is without us."""
    ids = batch(1, 12)["input_ids"][0] % VOCABULARY
    samples: Any = [{"input_ids": ids, "labels": ids}]
    trainer = generating_trainer(tmp_path)
    expected = trainer.predict(samples).predictions
    trainer = generating_trainer(tmp_path)
    with wf_accelerate.connect_trainer(trainer, {"sequence_parallel_size": 1}):
        assert (trainer.predict(samples).predictions == expected).all()
    assert "generate" not in vars(trainer.model)


def test_generating_under_fsdp_is_refused(tmp_path: Path) -> None:
    trainer = generating_trainer(tmp_path)
    trainer.is_fsdp_enabled = True
    with pytest.raises(NotImplementedError, match="predict_with_generate=True under FSDP"):
        wf_accelerate.connect_trainer(trainer, {"sequence_parallel_size": 1})
