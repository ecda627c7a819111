"""Plans of tiled training: which modules, within which budget; gradients and the predicted peak.

The reference is the same model without tiles.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from tests.autochunk.tiling.decoder import (
    ROWS,
    VOCABULARY,
    WIDTH,
    Decoder,
    Mlp,
    build_decoder,
    make_batch,
)
from tests.autochunk.tiling.helpers import WIDTH as NARROW
from tests.autochunk.tiling.helpers import TwoLayers, tiled_modules
from wf_backends.autochunk.graph import StorageTracker
from wf_backends.autochunk.tiling import TrainingPlan, apply_training, plan_training, training
from wf_backends.autochunk.tiling.fake_runs import refuse_row_counts
from wf_backends.autochunk.tiling.tiles import Tiles

FEW_ROWS = 128  # where a plan is made again and again for more tiles
NOTHING = TrainingPlan((), 0, 0, 0.0)


def plan_of(model: nn.Module, rows: int = ROWS, **kwargs: Any) -> TrainingPlan:
    return plan_training(model, kwargs=make_batch(rows), **kwargs)


def planned_modules(plan: TrainingPlan) -> list[str]:
    return [tiles.module for tiles in plan.tiles]


def gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    model(**make_batch())["loss"].backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.fixture(scope="module")
def full_plan() -> TrainingPlan:
    """Of a decoder with two layers: everything that can be tiled."""
    return plan_of(build_decoder(), max_slowdown=1.0)


def test_mlps_and_loss_are_tiled(full_plan: TrainingPlan) -> None:
    assert planned_modules(full_plan) == ["head", "mlp.0", "mlp.1"]
    assert full_plan.tiles[0].loss and full_plan.tiles[1].dim == 1
    assert full_plan.peak < 0.5 * full_plan.peak_before and 0 < full_plan.slowdown < 1 / 3
    text = full_plan.explain()
    assert "head: 4 tiles of its logits and loss" in text
    assert "not tiled: Attention, aten.scaled_dot_product_attention" in text


def test_mlps_are_tiled_by_a_plan_made_under_autocast() -> None:
    """Autocast casts a weight once: the first rows that are compared alone have that operator."""
    with torch.autocast("cpu", torch.bfloat16):
        plan = plan_of(build_decoder().float(), max_slowdown=1.0)
    assert planned_modules(plan) == ["head", "mlp.0", "mlp.1"]


def test_mlps_of_frozen_weights_are_tiled() -> None:
    model = build_decoder()
    for linear in model.mlp.modules():
        if isinstance(linear, nn.Linear):
            linear.bias = None
            linear.weight.requires_grad_(False)
    assert planned_modules(plan_of(model, max_slowdown=1.0)) == ["head", "mlp.0", "mlp.1"]


def test_model_that_cannot_be_trained_is_refused_with_the_reason() -> None:
    class InferenceOnly(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                raise NotImplementedError("no backward")
            return super().forward(x)

    model = build_decoder()
    model.mlp[0] = InferenceOnly()
    with pytest.raises(ValueError, match="Decoder cannot be trained on fake tensors: no backward"):
        plan_of(model)


def test_planning_leaves_the_model_untiled() -> None:
    model = build_decoder()
    assert plan_of(model, max_slowdown=1.0).tiles
    assert tiled_modules(model) == []


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_planning_leaves_no_gradients_in_a_model_with_checkpoints(use_reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(NARROW, NARROW), TwoLayers(use_reentrant))
    assert plan_training(model, (torch.ones(1, FEW_ROWS, NARROW),), max_slowdown=1.0).tiles
    assert all(p.grad is None for p in model.parameters())


def test_threads_plan_one_after_another() -> None:
    barrier, stdout = Barrier(2), sys.stdout

    def plan(_: int) -> list[str]:
        model = build_decoder()
        barrier.wait()
        return planned_modules(plan_of(model, max_slowdown=1.0))

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(plan, range(2))] == [["head", "mlp.0", "mlp.1"]] * 2
    assert sys.stdout is stdout


def test_gradients_of_a_plan_equal_those_of_the_model_and_leaving_it_restores_the_logits() -> None:
    model = build_decoder().double()
    expected = gradients(model)
    with apply_training(model, plan_of(model, max_slowdown=1.0)):
        grads = gradients(model)
        assert model(**make_batch()).keys() == {"loss"}
    for grad, expected_grad in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-10, atol=1e-12)
    assert model(**make_batch()).keys() == {"loss", "logits"}


@pytest.mark.parametrize("tiled", [False, True], ids=["untiled", "tiled"])
def test_predicted_peak_is_that_of_a_step(tiled: bool, full_plan: TrainingPlan) -> None:
    """A later step, in which the gradients of the earlier one are there."""
    model, batch = build_decoder(), make_batch()
    with apply_training(model, full_plan if tiled else NOTHING):
        gradients(model)
        earlier_grads = [p.grad for p in model.parameters() if p.grad is not None]
        known = (*model.parameters(), *earlier_grads, *batch.values())
        with StorageTracker(known) as tracker:
            model(**batch)["loss"].backward()
    predicted = full_plan.peak if tiled else full_plan.peak_before
    assert tracker.peak == pytest.approx(predicted, rel=0.05)


class FixedNumberOfRows(Mlp):
    """Reshapes to a number of rows, as Swin's layers do: that fails for a tile of the rows."""

    def forward(self, x: Tensor, rows: int = ROWS) -> Tensor:
        return super().forward(x).view(1, rows, WIDTH)


def test_module_that_fails_on_tiles_is_not_planned() -> None:
    model = build_decoder()
    model.mlp[1] = FixedNumberOfRows()
    plan = plan_of(model, max_slowdown=1.0)
    assert planned_modules(plan) == ["head", "mlp.0"]
    assert "not tiled: FixedNumberOfRows, no tiles: shape '[1, 512, 8]' is inv" in plan.explain()


class Scaled(Mlp):
    def __init__(self, factor: Callable[[int], float]) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor(x.shape[1])


FACTORS: dict[str, Callable[[int], float]] = {
    "quotient": lambda rows: 1 / rows,
    "one less": lambda rows: rows - 1,
    "logarithm": math.log,
    "branch": lambda rows: 2 if rows > ROWS // 2 else 1,
}


@pytest.mark.parametrize("factor", FACTORS)
def test_module_that_computes_with_the_number_of_its_rows_is_not_planned(factor: str) -> None:
    model = build_decoder()
    model.mlp[1] = Scaled(FACTORS[factor])
    plan = plan_of(model, max_slowdown=1.0)
    assert planned_modules(plan) == ["head", "mlp.0"]
    assert "not tiled: Scaled, no tiles: it computes with the number of its" in plan.explain()


class KeepingMlp(Mlp):
    """Keeps the mean or the number of rows of its input: in an attribute, a list, a buffer, which
    it replaces, or in another object."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.other = where, SimpleNamespace()
        self.losses: list[Tensor] = []
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "losses":
            self.losses.append(x.square().mean())
        elif self.where == "rows":
            self.rows = x.shape[1]
        else:
            owner = self.other if self.where == "a place outside its results" else self
            setattr(owner, self.where, x.detach().mean())
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")  # from torch.export
@pytest.mark.parametrize("where", ["loss", "losses", "mean", "rows", "a place outside its results"])
def test_module_that_keeps_a_value_of_its_call_is_not_planned(where: str) -> None:
    """Tiles would leave the value of the last tile there, without its gradient."""
    model = build_decoder()
    model.mlp[1] = KeepingMlp(where)
    plan = plan_of(model, max_slowdown=1.0)
    assert planned_modules(plan) == ["head", "mlp.0"]
    reason = f"no tiles: it keeps a value of each call in {where}"
    assert ("KeepingMlp", reason) in plan.refused


@dataclass
class Output:
    """No container that pytree knows."""

    y: Tensor


class OwnBackward(torch.autograd.Function):
    """Its gradients have a norm of 1: that of all rows, or of a tile's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] / grads[0].norm()


class InAForm(Mlp):
    """Its result is the same for a tile, except for its form or its gradient."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor, results: dict[str, Any] | None = None) -> Any:
        y = super().forward(x)
        if results is not None:
            results["new"] = y.square() if self.form == "dict" else results.get("new", 0) + 1
        number = (y, x.shape[1])
        forms = {"number": number, "object": Output(y), "backward": OwnBackward.apply(y)}
        return forms.get(self.form, y)


class ReadsAForm(nn.Module):
    """`mlp.1` of a decoder."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.part, self.form = InAForm(form), form

    def forward(self, x: Tensor) -> Tensor:
        results: dict[str, Any] = {}
        y = self.part(x, results) if self.form in ("dict", "counter") else self.part(x)
        y = y[0] / y[1] if self.form == "number" else getattr(y, "y", y)
        new = results.get("new", 0)
        return x + y.mean() + (new.mean() if self.form == "dict" else new)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ("dict", "it keeps a value of each call in what it is given"),
        ("counter", "it keeps a value of each call in what it is given"),
        ("number", "it computes with the number of its rows"),
        ("object", "it keeps a value of each call in a place outside its results"),
        ("backward", "its backward is that of OwnBackward, which has no rule"),
    ],
)
def test_module_whose_tiles_would_give_other_results_or_gradients_is_not_planned(
    form: str, reason: str
) -> None:
    model = build_decoder()
    model.mlp[1] = ReadsAForm(form)
    plan = plan_of(model, max_slowdown=1.0)
    assert planned_modules(plan) == ["head", "mlp.0"]
    assert ("InAForm", f"no tiles: {reason}") in plan.refused


class Conditioned(Mlp):
    scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class CalledTwice(nn.Module):
    def __init__(self, scale: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.scale = Conditioned(), scale

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            self.layer.scale = self.scale(x)
            x = x + self.layer(x)
        return x


@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")  # from torch.export
def test_module_that_finds_a_tensor_in_an_attribute_is_not_planned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The backward of the first call would compute its tiles with the tensor of the second."""
    reasons = {
        "it computes with a tensor that it is not given": lambda x: x.detach().mean((0, 1)),
        "Attempting to broadcast": lambda x: x,
    }
    for reason, scale in reasons.items():
        model = CalledTwice(scale).train()
        plan = plan_training(model, (torch.randn(2, ROWS, WIDTH),), max_slowdown=1.0)
        assert plan.tiles == () and f"Conditioned, no tiles: {reason}" in plan.explain()
    assert not [log for log in caplog.records if log.levelname == "ERROR"]  # of the second one


def test_module_with_a_number_that_happens_to_be_that_of_its_rows_is_planned() -> None:
    model = build_decoder()
    model.mlp[1] = Scaled(lambda _: ROWS)
    assert "mlp.1" in planned_modules(plan_of(model, max_slowdown=1.0))


class Normed(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.norm(x[0])


def test_model_with_a_batch_norm_is_planned_and_keeps_its_statistics() -> None:
    """Its own code runs, so that the buffers change once in a step, and in no planning."""
    model = build_decoder()
    model.mlp[1] = Normed()
    buffers = [buffer.clone() for buffer in model.buffers()]
    plan = plan_of(model, max_slowdown=1.0)
    assert planned_modules(plan) == ["head", "mlp.0"]
    assert ("Normed", "changes its buffers") in plan.refused
    assert all(map(torch.equal, model.buffers(), buffers))


class AtLeast100Rows(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] < 100:
            raise IndexError("too few rows")
        return super().forward(x)


def test_finer_tiles_on_which_a_module_fails_are_not_planned() -> None:
    model = build_decoder()
    model.mlp[0], model.mlp[1] = AtLeast100Rows(), AtLeast100Rows()
    with pytest.raises(ValueError, match="is too little for a training step: the closest plan"):
        plan_of(model, max_memory=1000, max_slowdown=1.0)


def test_layer_that_may_be_dropped_is_planned() -> None:
    """OPT and BioGPT draw a number for each layer, also where none is dropped."""

    class LayerDrop(TwoLayers):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if torch.rand([]) < 0.0:
                    continue
                x = x + layer(x)
            return x

    x = torch.randn(2, 64, NARROW)
    plans = [plan_training(m.train(), (x,), max_slowdown=1.0) for m in (TwoLayers(), LayerDrop())]
    assert plans[0] == plans[1] and plans[1].peak_before


def test_check_of_values_outside_compilation_is_assumed_to_pass() -> None:
    """transformers looks for padding so, where it gets no mask."""

    class ChecksIds(Decoder):
        def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            if not torch.compiler.is_compiling() and not (ids >= 0).all():
                raise ValueError("padding")
            return super().forward(ids, labels)

    plan = plan_of(ChecksIds().train(), max_slowdown=1.0)
    assert planned_modules(plan) == ["head", "mlp.0", "mlp.1"]


class TestBudget:
    """`max_memory` in bytes, as a share or as a size; `max_slowdown` as a share of the time."""

    def test_without_slowdown_only_the_loss_is_tiled(self) -> None:
        """Its tiles are not computed again."""
        plan = plan_of(build_decoder(), max_slowdown=0.0)
        assert planned_modules(plan) == ["head"] and plan.slowdown == 0.0

    def test_no_more_is_tiled_than_the_memory_needs(self, full_plan: TrainingPlan) -> None:
        model = build_decoder()
        loss_only = plan_of(model, max_slowdown=0.0)
        assert plan_of(model, max_memory=full_plan.peak_before).tiles == ()
        plan = plan_of(model, max_memory=loss_only.peak, max_slowdown=1.0)
        assert planned_modules(plan) == ["head"]

    def test_module_whose_tiles_do_not_lower_the_peak_is_not_tiled(self) -> None:
        """A frozen MLP keeps nothing for the backward: the logits are the peak."""
        model = build_decoder(layers=1, scale=0.5)
        model.requires_grad_(False)
        model.head.requires_grad_(True)
        plan = plan_of(model, max_slowdown=1.0)
        assert plan.tiles == () and plan.peak == plan.peak_before
        assert "Mlp" not in dict(plan.refused)

    def test_memory_as_a_share_of_the_untiled_peak(self, full_plan: TrainingPlan) -> None:
        share = (full_plan.peak + 1) / full_plan.peak_before
        assert plan_of(build_decoder(), max_memory=share, max_slowdown=1.0) == full_plan

    def test_memory_as_a_size(self) -> None:
        plan = plan_training(build_decoder(), (), make_batch(), "1GB")
        assert plan.tiles == () and plan.peak < 1e9

    def test_as_many_layers_are_tiled_as_the_slowdown_allows(self) -> None:
        """Two of four MLPs take half the time of four."""
        model = build_decoder(layers=4)
        full_plan = plan_of(model, max_slowdown=1.0)
        plan = plan_of(model, max_slowdown=0.6 * full_plan.slowdown)
        assert planned_modules(plan) == ["head", "mlp.0", "mlp.1"]
        assert plan.slowdown == pytest.approx(full_plan.slowdown / 2)

    def test_less_memory_makes_more_tiles(self) -> None:
        model = build_decoder()
        plan = plan_of(model, FEW_ROWS, max_slowdown=1.0)
        finer = plan_of(model, FEW_ROWS, max_memory=plan.peak - 1, max_slowdown=1.0)
        assert finer.peak < plan.peak
        assert all(a.tiles > b.tiles for a, b in zip(finer.tiles, plan.tiles, strict=True))

    def test_budget_below_every_plan_is_refused_with_the_closest_plan(self) -> None:
        model = build_decoder()
        with pytest.raises(ValueError, match="max_memory 1000 .1000 bytes. is too little") as error:
            plan_of(model, FEW_ROWS, max_memory=1000)
        assert "closest plan within max_slowdown 0.1 needs" in str(error.value)
        assert tiled_modules(model) == []

    def test_budget_that_more_slowdown_would_keep_is_refused_with_that_slowdown(self) -> None:
        with pytest.raises(ValueError, match=r"max_slowdown 0\.\d\d would allow one that needs"):
            plan_of(build_decoder(), FEW_ROWS, max_memory=1000, max_slowdown=0.0)

    @pytest.mark.parametrize(
        ("budget", "message"),
        [
            ({"max_memory": "a lot"}, "max_memory must be a number of bytes or a size"),
            ({"max_slowdown": -0.5}, "max_slowdown must be a number such as 0.1, 0 or more"),
        ],
    )
    def test_wrong_budget_is_refused(self, budget: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            plan_of(build_decoder(), **{"max_memory": 1000} | budget)


@pytest.mark.parametrize("dropout", [0.1, 0.0])
def test_dropout_is_a_wall_unless_its_rate_is_0(dropout: float) -> None:
    plan = plan_of(build_decoder(dropout=dropout), max_slowdown=1.0)
    reason = "Mlp", "aten.dropout.default has no rule along dimension 1"
    assert (reason in plan.refused) == (dropout > 0)
    assert planned_modules(plan) == (["head"] if dropout else ["head", "mlp.0", "mlp.1"])


OTHERS: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "labels": lambda labels: {"labels": labels.masked_fill(labels % 3 == 0, -100)},
    "shift_labels": lambda labels: {"labels": labels, "shift_labels": labels.roll(1, 1)},
    "ignore_index": lambda labels: {"labels": labels, "ignore_index": 5},
}


@pytest.mark.parametrize("name", OTHERS)
def test_head_of_a_model_that_changes_what_its_loss_gets_is_not_planned(name: str) -> None:
    """The head's tiles compute with the arguments of the model."""

    class OwnLoss(Decoder):
        def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            options = {"logits": self.head(self.mlp[0](self.embed(ids))), "vocab_size": VOCABULARY}
            return {"loss": self.loss_function(**options, **OTHERS[name](labels))}

    model = OwnLoss().train()
    plan = plan_of(model, max_slowdown=1.0)
    assert planned_modules(plan) == ["mlp.0"]
    assert f"no tiles: this model computes its loss with other {name} than" in plan.explain()


def test_scaled_logits_are_a_wall() -> None:
    plan = plan_of(build_decoder(scale=0.5), max_slowdown=1.0)
    assert planned_modules(plan) == ["mlp.0", "mlp.1"]
    assert any("stands between the head and the loss" in reason for _, reason in plan.refused)


class TestJson:
    def test_plan_survives_json(self, full_plan: TrainingPlan) -> None:
        assert TrainingPlan.from_json(full_plan.to_json()) == full_plan

    @pytest.mark.parametrize(
        "text", ["[]", "{}", "no", '{"tiles": [{"name": "a"}], "refused": []}']
    )
    def test_text_that_is_no_plan_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match="no training plan"):
            TrainingPlan.from_json(text)

    def test_wrong_field_is_refused_by_name(self) -> None:
        text = json.dumps(json.loads(NOTHING.to_json()) | {"peak": "3"})
        with pytest.raises(ValueError, match="plan.peak must be an integer, got '3'"):
            TrainingPlan.from_json(text)


def test_modules_that_could_save_nothing_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Llama is run without tiles, with its loss and with its MLPs in tiles, and not with its
    rotary embedding."""
    config = {"hidden_size": 64, "intermediate_size": 256, "vocab_size": 16384}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config, **heads)).train()
    run = Mock(wraps=training.training_peak)
    monkeypatch.setattr(training, "training_peak", run)
    ids = torch.zeros(1, 1024, dtype=torch.long)
    plan = plan_training(model, kwargs={"input_ids": ids, "labels": ids}, max_slowdown=1.0)
    assert planned_modules(plan) == ["lm_head", "model.layers.0.mlp", "model.layers.1.mlp"]
    assert run.call_count == 3


@pytest.mark.parametrize(
    ("name", "config_name", "expected"),
    [
        (
            "LlamaForCausalLM",
            "LlamaConfig",
            ["lm_head", "model.layers.0.mlp", "model.layers.1.mlp"],
        ),
        (  # its logits are capped
            "Gemma2ForCausalLM",
            "Gemma2Config",
            ["model.layers.0.mlp", "model.layers.1.mlp"],
        ),
        (  # its MLPs end with dropout
            "GPT2LMHeadModel",
            "GPT2Config",
            ["lm_head", "transformer.h.0.mlp.act", "transformer.h.1.mlp.act"],
        ),
    ],
    ids=["llama", "gemma2", "gpt2"],
)
def test_modules_and_loss_of_transformers_models(
    name: str, config_name: str, expected: list[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, config_name)(
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, vocab_size=999,
        hidden_size=16, intermediate_size=64, use_cache=False,
    )  # fmt: skip
    model = getattr(transformers, name)(config).train()
    ids = torch.randint(64, (1, 256))
    batch = {"input_ids": ids, "labels": ids.clone()}
    plan = plan_training(model, kwargs=batch, max_slowdown=1.0)
    assert planned_modules(plan) == expected, plan.explain()
    torch.manual_seed(0)  # for dropout
    expected_loss = model(**batch).loss
    with apply_training(model, plan):
        torch.manual_seed(0)
        torch.testing.assert_close(model(**batch).loss, expected_loss, rtol=1e-5, atol=1e-5)


def test_a_module_is_compared_with_its_tiles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the plan grows afterwards, here by MLPs of another width."""
    compared: list[Tiles] = []

    def counted(model: nn.Module, tiles: Collection[Tiles], *inputs: Any) -> None:
        compared.extend(tiles)
        refuse_row_counts(model, tiles, *inputs)

    monkeypatch.setattr("wf_backends.autochunk.tiling.training.refuse_row_counts", counted)
    model = build_decoder()
    model.mlp[1].up, model.mlp[1].down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
    plan = plan_of(model, max_slowdown=1.0)
    assert planned_modules(plan) == ["head", "mlp.1", "mlp.0"]
    assert sorted(map(str, compared)) == sorted(map(str, plan.tiles))


def test_modules_that_save_once_others_are_tiled_are_tried_again() -> None:
    """The error said that max_slowdown 0.07 would allow a plan, where 1.0 was given."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 512, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 600}
    sizes |= {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).double().train()
    model.gradient_checkpointing_enable()
    ids = torch.zeros(1, 300, dtype=torch.long)
    kwargs = {"input_ids": ids, "labels": ids, "use_cache": False}
    plan = plan_training(model, kwargs=kwargs, max_memory=0.8, max_slowdown=1.0)
    assert plan.peak <= 0.8 * plan.peak_before
