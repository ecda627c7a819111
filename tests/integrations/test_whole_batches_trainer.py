"""What a Trainer does with a model that takes whole batches: it counts the loss of a group once."""

from __future__ import annotations

import random
import sys
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate is not installed", exc_type=ImportError)
pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

import accelerate.accelerator  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.utils import gather  # noqa: E402

from tests.helpers import run_threads  # noqa: E402
from tests.integrations.deepspeed_jobs import tiny_llama  # noqa: E402
from tests.integrations.transformers_models import one_rank, sequence_parallel  # noqa: E402
from wf_transformers import WholeBatchHooks, attach, counted_by_group  # noqa: E402
from wf_transformers.comparison.dropout import restored_draws  # noqa: E402
from wf_transformers.whole_batches import by_group  # noqa: E402
from wf_transformers.whole_batches.by_group import GroupsAsProcesses  # noqa: E402
from wf_transformers.whole_batches.log_probabilities import generate_alone  # noqa: E402
from wf_transformers.whole_batches.trainer import (  # noqa: E402
    counting_groups,
    loss_only,
    resuming,
    shared_operations,
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
    ("prediction_loss_only", "added"), [(True, {"whole_logits": "hidden"}), (False, {})]
)
def test_loss_only_turns_whole_logits_off_if_only_the_loss_is_needed(
    prediction_loss_only: bool, added: dict[str, str]
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


def of_four_ranks(x: torch.Tensor) -> torch.Tensor:
    """Stands for accelerate's `gather` on rank 3 of four: each rank has 1 more than the last."""
    return torch.cat([x - 3, x - 2, x - 1, x])


class Counter:
    """Stands for a Trainer whose methods count processes."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator

    def counts(self, x: torch.Tensor) -> list[Any]:
        gathered = [self.accelerator.gather(x).tolist(), gather(x).tolist()]
        return [self.accelerator.num_processes, self.accelerator.process_index, *gathered]


def test_a_trainer_counts_a_group_as_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its own methods and in those that these call, whether it calls the accelerator's gather
    or, as trainers of TRL, accelerate's function."""
    monkeypatch.setattr(Accelerator, "num_processes", 4)
    monkeypatch.setattr(Accelerator, "process_index", 3)
    monkeypatch.setattr(by_group, "PartialState", lambda: SimpleNamespace(num_processes=4))
    for module in (accelerate.utils, accelerate.accelerator, sys.modules[__name__]):
        monkeypatch.setattr(module, "gather", of_four_ranks)
    accelerator, x = Accelerator(cpu=True), torch.tensor([13])
    trainer = Counter(accelerator)
    with counted_by_group(accelerator, lambda: 2):
        counting = partial(counting_groups, trainer, trainer.counts)
        assert counting_groups(trainer, counting, x) == [2, 1, [10, 12], [10, 12]]
        assert shared_operations(trainer, len, "its batch's") == 11 / 2
        assert trainer.counts(x) == [4, 3, [10, 11, 12, 13], [10, 11, 12, 13]]
    assert counting(x) == trainer.counts(x)  # nothing is connected


def test_an_accelerator_of_groups_adds_up_groups_and_keeps_what_is_set() -> None:
    """The ranks of a group have equal numbers, as the ratios that TRL's trainers add up."""
    factors = {"sum": 4, "max": 1}
    accelerator: Any = SimpleNamespace(
        num_processes=4, process_index=3, reduce=lambda x, reduction, _: factors[reduction] * x
    )
    groups = GroupsAsProcesses(accelerator, 2)
    for x in (torch.tensor([3, 5]), torch.tensor([0.5, 2.0])):
        assert groups.reduce(x).tolist() == (2 * x).tolist()
        assert groups.reduce(x).dtype == x.dtype
        assert groups.reduce(x, reduction="max").tolist() == x.tolist()
    groups.step = 7
    assert accelerator.step == groups.step == 7


def warnings_of_resuming(loader: Any, accumulation: int, step: int, epoch: float) -> list[str]:
    """What a Trainer says that resumes from a checkpoint at `step` and `epoch`."""
    args = SimpleNamespace(ignore_data_skip=False, gradient_accumulation_steps=accumulation)
    trainer = SimpleNamespace(
        args=args,
        accelerator=None,
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
