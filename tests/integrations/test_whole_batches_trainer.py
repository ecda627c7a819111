"""What a Trainer does with a model that takes whole batches: it counts the loss of a group once."""

from __future__ import annotations

import random
import warnings
from contextlib import nullcontext
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)


from tests.helpers import run_threads  # noqa: E402
from tests.integrations.deepspeed_jobs import tiny_llama  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402  # noqa: E402
    build,
    one_rank,
    sequence_parallel,
    tiny,
)
from wf_transformers import WholeBatchHooks, attach  # noqa: E402
from wf_transformers.comparison.dropout import restored_draws  # noqa: E402
from wf_transformers.whole_batches.log_probabilities import generate_alone  # noqa: E402
from wf_transformers.whole_batches.trainer import (  # noqa: E402
    compared_first,
    counted_once,
    inner_loss_counted_once,
    loss_only,
    resuming,
)


def test_a_loss_that_generates_and_draws_is_compared() -> None:
    """As of a policy by hand. While it generates, a rank's rows are those of one process; both
    runs draw the same, also from Python's random numbers."""
    models = [tiny_llama() for _ in range(2)]

    def rank(comm: Any) -> None:
        model = models[comm.rank]
        handle = attach(model, sequence_parallel(comm), verify="strict")
        WholeBatchHooks(model, handle)
        generate_alone(model, handle, handle.first.changes)

        def loss(part: Any, alone: bool) -> dict[str, torch.Tensor]:
            with torch.no_grad():
                ids = model.generate(part["input_ids"][:, :4], max_new_tokens=9, do_sample=True)
            logits = model(input_ids=ids, use_cache=False).logits[:, torch.randperm(13)[:5]]
            return {"loss": logits.logsumexp(-1).mean() * torch.randint(1, 99, ())}

        handle.compare_first({"input_ids": torch.arange(24)[None]}, call=loss)

    run_threads(2, rank)
    with restored_draws():
        first = random.random()
    assert random.random() == first


def prediction_step(model: Any, inputs: dict[str, Any], prediction_loss_only: bool) -> Any:
    """Stand for the Trainer's: return the inputs that it would call the model with."""
    return inputs


@pytest.mark.parametrize(
    ("prediction_loss_only", "added"), [(True, {"whole_logits": False}), (False, {})]
)
def test_loss_only_turns_whole_logits_off_if_only_the_loss_is_needed(
    prediction_loss_only: bool, added: dict[str, bool]
) -> None:
    model = tiny_llama()
    WholeBatchHooks(model, attach(model, one_rank()))
    around = torch.nn.Sequential(model)  # as DDP is
    assert loss_only(None, prediction_step, around, {}, prediction_loss_only) == added
    by_keyword = {"prediction_loss_only": prediction_loss_only}
    assert loss_only(None, prediction_step, around, {}, **by_keyword) == added


def test_loss_only_adds_nothing_for_a_model_without_hooks() -> None:
    model = tiny_llama()
    hooks = WholeBatchHooks(model, attach(model, one_rank()))
    hooks.handle.remove()
    assert loss_only(None, prediction_step, torch.nn.Sequential(model), {}, True) == {}


def compute_loss(
    model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
) -> torch.Tensor:
    """Stand for the Trainer's with two processes: it multiplies a mean by their number."""
    assert num_items_in_batch == 8  # labels of one of both
    return torch.tensor(2 * 1.5)


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "LlamaForTokenClassification", "CLIPTextModel"]
)
def test_the_trainer_counts_a_group_once_for_models_of_any_head(name: str) -> None:
    """Heads over the rows of all ranks and models that are cut inside have hooks of their own."""
    model = tiny(name)
    args = SimpleNamespace(average_tokens_across_devices=True)
    trainer = SimpleNamespace(args=args, model_accepts_loss_kwargs=True, compute_loss_func=None)

    def rank(comm: Any) -> float:
        copied = deepcopy(model)
        WholeBatchHooks(copied, attach(copied, sequence_parallel(comm), verify=False))
        around = torch.nn.Sequential(copied)  # as DDP is
        counted = counted_once(trainer, compute_loss, around, {}, num_items_in_batch=16)
        return counted.item()

    assert run_threads(2, rank) == [1.5, 1.5]


def test_the_trainer_counts_a_model_that_runs_alone_as_it_does_without_us() -> None:
    """As before the first step, where its loss on one rank is compared."""
    args = SimpleNamespace(average_tokens_across_devices=True)
    trainer = SimpleNamespace(args=args, model_accepts_loss_kwargs=True, compute_loss_func=None)

    def rank(comm: Any) -> float:
        model = build("llama", "eager", {})
        handle = attach(model, sequence_parallel(comm))
        WholeBatchHooks(model, handle)
        with handle.first.changes.undone():
            return counted_once(trainer, compute_loss, model, {}, num_items_in_batch=8).item()

    assert run_threads(2, rank) == [3.0, 3.0]


def test_a_loss_that_divides_by_the_labels_of_all_processes_is_told_so() -> None:
    """The ranks of a sequence count its labels once each."""
    models, ids = [tiny_llama() for _ in range(2)], torch.arange(24)[None]
    args = SimpleNamespace(average_tokens_across_devices=True)

    def own_loss(model: Any, inputs: dict[str, Any], **kwargs: Any) -> torch.Tensor:
        return model(**inputs, **kwargs).loss

    def rank(comm: Any) -> list[str]:
        WholeBatchHooks(models[comm.rank], attach(models[comm.rank], sequence_parallel(comm)))
        trainer = SimpleNamespace(
            args=args,
            accelerator=SimpleNamespace(state=SimpleNamespace(num_processes=2)),
            compute_loss=own_loss,
            compute_loss_context_manager=nullcontext,
            _prepare_inputs=dict,
        )
        with pytest.raises(NotImplementedError, match="its loss is the first") as error:
            compared_first(trainer, print, models[comm.rank], {"input_ids": ids, "labels": ids}, 46)
        return error.value.__notes__

    for notes in run_threads(2, rank):
        assert "multiplies by accelerator.num_processes" in notes[0]


def smooth(output: Any, labels: Any, shift_labels: bool = False) -> torch.Tensor:
    """Stand for transformers 4's label smoother, which divides by no number of all processes."""
    return torch.tensor(3.0)


@pytest.mark.parametrize(
    ("trains", "function", "options", "expected"),
    [
        (True, compute_loss, {"num_items_in_batch": 16}, 1.5),
        (True, smooth, {"shift_labels": True}, 1.5),
        (False, smooth, {"shift_labels": True}, 3.0),  # the Trainer counts labels in training only
    ],
)
def test_a_trainer_with_its_own_compute_loss_counts_a_group_once(
    trains: bool, function: Any, options: dict[str, Any], expected: float
) -> None:
    """TRL's SFTTrainer with `label_smoothing_factor` or a `compute_loss_func`."""
    args = SimpleNamespace(average_tokens_across_devices=True)

    def rank(comm: Any) -> float:
        model = build("llama", "eager", {}).train(trains)
        WholeBatchHooks(model, attach(model, sequence_parallel(comm)))
        trainer = SimpleNamespace(
            args=args, model=model, model_accepts_loss_kwargs=True, compute_loss_func=None
        )
        return inner_loss_counted_once(trainer, function, {}, {}, **options).item()

    assert run_threads(2, rank) == [expected, expected]


def warnings_of_resuming(loader: Any, accumulation: int, step: int, epoch: float) -> list[str]:
    """What a Trainer says that resumes from a checkpoint at `step` and `epoch`."""
    args = SimpleNamespace(ignore_data_skip=False, gradient_accumulation_steps=accumulation)
    trainer = SimpleNamespace(
        args=args,
        model=torch.nn.Linear(1, 1),
        callback_handler=SimpleNamespace(train_dataloader=loader),
        state=SimpleNamespace(global_step=step, epoch=epoch),
        is_world_process_zero=lambda: True,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resuming(trainer, lambda _: None, "checkpoint")
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("batches", "accumulation", "step", "epoch"),
    [(12, 1, 5, 5 / 12), (24, 2, 5, 5 / 12), (17, 8, 5, 1 + 16 / 17), (24, 2, 12, 1.0)],
    ids=["in an epoch", "other ranks", "smaller last steps", "end of an epoch"],
)
def test_a_trainer_that_resumes_with_steps_of_the_same_size_says_nothing(
    batches: int, accumulation: int, step: int, epoch: float
) -> None:
    assert not warnings_of_resuming(range(batches), accumulation, step, epoch)


@pytest.mark.parametrize(
    ("batches", "step", "epoch", "instead"),
    [(24, 5, 5 / 12, 2), (24, 1, 1 / 12, 2), (6, 5, 5 / 12, 0.5), (16, 48, 4.0, 1.333)],
)
def test_a_trainer_that_resumes_with_steps_of_another_size_warns(
    batches: int, step: int, epoch: float, instead: float
) -> None:
    """It would read samples twice or leave some out, unless it begins the epoch again."""
    (warning,) = warnings_of_resuming(range(batches), 1, step, epoch)
    assert f"gradient_accumulation_steps=1 would have to be {instead}" in warning
    assert f"{step} steps before the checkpoint" in warning
