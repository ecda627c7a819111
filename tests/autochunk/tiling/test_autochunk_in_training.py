"""autochunk(model) of a model in training tiles the model itself.

It gives the model `plan`, `explain` and `remove`; a plan is for training or for inference.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.autochunk.tiling.decoder import ROWS, Decoder, Mlp, build_decoder, make_batch
from tests.autochunk.tiling.helpers import tiled_modules
from wf_backends.autochunk import ChunkPlan, autochunk
from wf_backends.autochunk.tiling import TrainingPlan, plan_training


@pytest.fixture
def model() -> Decoder:
    return build_decoder()


@pytest.fixture
def plan(model: Decoder) -> TrainingPlan:
    """Tiles the model, and returns the plan."""
    plan = autochunk(model, kwargs=make_batch(), max_memory=0.9).plan
    assert isinstance(plan, TrainingPlan)
    return plan


def test_model_is_tiled_in_place(model: Decoder) -> None:
    names, expected = list(model.state_dict()), model(**make_batch())["loss"]
    chunked = autochunk(model, kwargs=make_batch(), max_memory=0.9)
    assert chunked is model and [tiles.module for tiles in chunked.plan.tiles] == ["head"]
    assert chunked.explain() == chunked.plan.explain()
    assert list(chunked.state_dict()) == names
    torch.testing.assert_close(chunked(**make_batch())["loss"], expected)


def test_module_with_two_names_is_tiled_once(model: Decoder) -> None:
    """The trace has both."""
    model.double().mlp[1] = model.mlp[0]
    model(**make_batch())["loss"].backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    chunked = autochunk(model, kwargs=make_batch(), max_slowdown=1.0)
    assert [tiles.module for tiles in chunked.plan.tiles] == ["head", "mlp.0"]
    chunked(**make_batch())["loss"].backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-9, atol=1e-12)


def test_slowdown_counts_all_calls_of_a_module(model: Decoder) -> None:
    both = plan_training(model, kwargs=make_batch(), max_slowdown=1.0)
    model.mlp[1] = model.mlp[0]
    twice = plan_training(model, kwargs=make_batch(), max_slowdown=1.0)
    assert twice.slowdown == pytest.approx(both.slowdown)
    once = plan_training(model, kwargs=make_batch(), max_slowdown=0.75 * twice.slowdown)
    assert [tiles.module for tiles in once.tiles] == ["head"]


def test_remove_restores_the_model(model: Decoder, plan: TrainingPlan) -> None:
    model.remove()
    assert tiled_modules(model) == [] and not hasattr(model, "plan")


def test_removing_the_tiles_of_a_copy_leaves_the_model_tiled(
    model: Decoder, plan: TrainingPlan
) -> None:
    copied = copy.deepcopy(model)
    copied.remove()
    assert tiled_modules(copied) == [] and tiled_modules(model) == ["head"]
    assert not copied._forward_hooks and model._forward_hooks
    batch = make_batch()
    torch.testing.assert_close(copied(**batch)["loss"], model(**batch)["loss"])


def test_tiled_model_can_be_pickled(model: Decoder, plan: TrainingPlan) -> None:
    batch, loaded = make_batch(), pickle.loads(pickle.dumps(model))
    assert torch.equal(loaded(**batch)["loss"], model(**batch)["loss"])
    loaded.remove()
    torch.testing.assert_close(loaded(**batch)["loss"], model(**batch)["loss"])


def test_tiled_model_is_refused(model: Decoder, plan: TrainingPlan) -> None:
    with pytest.raises(ValueError, match=r"tiled by an earlier call: call model.remove\(\) first"):
        autochunk(model, kwargs=make_batch(), max_memory=0.9)


def test_plan_can_be_passed_again(model: Decoder, plan: TrainingPlan) -> None:
    model.remove()
    assert autochunk(model, kwargs=make_batch(), plan=plan).plan is plan


def test_training_plan_is_refused_in_evaluation(model: Decoder, plan: TrainingPlan) -> None:
    model.remove()
    with pytest.raises(ValueError, match="plan is one for training, and the model is not"):
        autochunk(model.eval(), kwargs=make_batch(), plan=plan)


def test_inference_plan_is_refused_in_training(model: Decoder) -> None:
    plan = ChunkPlan("", (), 0, 0, 0.0)
    with pytest.raises(ValueError, match="must be a TrainingPlan for a model in training"):
        autochunk(model.train(), kwargs=make_batch(), plan=plan)


class OwnLoss(Decoder):
    """Computes its loss without its `loss_function`, as T5 does."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.mlp[0](self.embed(ids)))
        return {"loss": F.cross_entropy(logits.view(-1, logits.size(-1)), labels.flatten())}


def test_head_of_a_model_that_computes_its_loss_itself_is_not_tiled() -> None:
    plan = plan_training(OwnLoss().train(), kwargs=make_batch(), max_slowdown=1.0)
    assert [tiles.module for tiles in plan.tiles] == ["mlp.0"]
    assert "not tiled: Linear, no tiles: Dimension specified as -1" in plan.explain()


def test_planning_takes_no_longer_for_more_tiles() -> None:
    """Of equal tiles it computes two; the plan is that of all."""

    def tiles_and_calls(rows: int) -> tuple[int, int]:
        calls: list[int] = []  # the rows of each

        class CountedMlp(Mlp):
            def forward(self, x: Tensor) -> Tensor:
                calls.append(x.shape[1])
                return super().forward(x)

        model = build_decoder()
        model.mlp[0] = CountedMlp()
        plan = plan_training(model, kwargs=make_batch(rows), max_slowdown=1.0)
        return plan.tiles[1].tiles, len(calls)

    (few, calls), (many, same_calls) = tiles_and_calls(ROWS), tiles_and_calls(4 * ROWS)
    assert many > few > 3
    assert same_calls == calls
