"""What is tiled in training is found by itself, within a budget, and is what it was predicted."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.tiling.test_tiled_loss import ForCausalLMLoss
from wf_backends.autochunk import ChunkPlan, autochunk
from wf_backends.graph import Effects, StorageTracker
from wf_backends.graph.capture import capture
from wf_backends.tiling import TrainingPlan, apply_training, plan_training
from wf_backends.tiling.tileable import Candidate, candidates, head_candidate

WIDTH, ROWS, BIG = 8, 512, 320
FEW = 128  # rows, where a plan is made again and again for more tiles


class Mlp(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(F.gelu(self.up(x))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]


class Causal(nn.Module):
    """Layers, a head and transformers' form of a loss."""

    def __init__(self, layers: int = 2, drop: float = 0.0, scale: float = 1.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(BIG, WIDTH)
        self.mix = nn.ModuleList(Attention() for _ in range(layers))
        self.mlp = nn.ModuleList(Mlp(drop) for _ in range(layers))
        self.head, self.scale = nn.Linear(WIDTH, BIG), scale
        self.loss_function = ForCausalLMLoss

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for mix, mlp in zip(self.mix, self.mlp, strict=True):
            x = x + mix(x)
            x = x + mlp(x)
        logits = self.head(x)
        logits = logits if self.scale == 1 else logits * self.scale
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=BIG)
        return {"loss": loss, "logits": logits}


def model_of(**words: Any) -> Causal:
    torch.manual_seed(0)
    return Causal(**words)


def batch(rows: int = ROWS) -> dict[str, Tensor]:
    ids = torch.randint(BIG, (1, rows), generator=torch.Generator().manual_seed(1))
    return {"ids": ids, "labels": ids.clone()}


def plan_of(model: nn.Module, rows: int = ROWS, **words: Any) -> TrainingPlan:
    return plan_training(model, kwargs=batch(rows), **words)


def modules(plan: TrainingPlan) -> list[str]:
    return [one.module for one in plan.tiles]


def gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    model(**batch())["loss"].backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_it_finds_the_mlps_and_the_loss() -> None:
    model = model_of()
    plan = plan_of(model, max_slowdown=1.0)
    assert modules(plan) == ["head", "mlp.0", "mlp.1"]
    assert plan.tiles[0].loss and plan.tiles[1].dim == 1
    assert plan.peak < 0.5 * plan.peak_before and 0 < plan.slowdown < 1 / 3
    assert not any("forward" in vars(module) for module in model.modules())
    text = plan.explain()
    assert "head: 4 tiles of its logits and loss" in text
    assert "not tiled: Attention, aten.scaled_dot_product_attention" in text


def test_gradients_are_those_without_a_plan_and_the_handle_takes_it_back() -> None:
    model = model_of().double()
    right = gradients(model)
    with apply_training(model, plan_of(model, max_slowdown=1.0)):
        found = gradients(model)
        assert model(**batch()).keys() == {"loss"}
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert model(**batch()).keys() == {"loss", "logits"}


@pytest.mark.parametrize("tiled", [False, True])
def test_the_predicted_peak_is_that_of_a_step(tiled: bool) -> None:
    model, given = model_of(), batch()
    plan = plan_of(model, max_slowdown=1.0)
    with apply_training(model, plan if tiled else TrainingPlan((), 0, 0, 0.0)):
        gradients(model)  # earlier batches left their gradients
        left = [p.grad for p in model.parameters() if p.grad is not None]
        with StorageTracker((*model.parameters(), *left, *given.values())) as tracker:
            model(**given)["loss"].backward()
    predicted = plan.peak if tiled else plan.peak_before
    assert tracker.peak == pytest.approx(predicted, rel=0.05)


class Told(Mlp):
    """Is told its rows by a number, as Swin's layers are: a part of them is no view of all."""

    def forward(self, x: Tensor, rows: int = ROWS) -> Tensor:
        return super().forward(x).view(1, rows, WIDTH)


def test_a_module_that_does_not_run_by_tiles_is_refused() -> None:
    model = model_of()
    model.mlp[1] = Told()
    plan = plan_of(model, max_slowdown=1.0)
    assert modules(plan) == ["head", "mlp.0"]
    assert "not tiled: Told, no tiles: shape '[1, 512, 8]' is invalid" in plan.explain()


class Short(Mlp):
    """Does not run with fewer rows than 100."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] < 100:
            raise RuntimeError("too few rows")
        return super().forward(x)


def test_finer_tiles_that_do_not_run_are_not_planned() -> None:
    model = model_of()
    model.mlp[0], model.mlp[1] = Short(), Short()
    with pytest.raises(ValueError, match="is too little for a training step: the closest plan"):
        plan_of(model, max_memory=1000, max_slowdown=1.0)


def test_a_branch_on_values_that_is_not_captured_is_taken_as_if_it_were_true() -> None:
    """As transformers looks for padding where no mask is given."""

    class Asking(Causal):
        def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            if not torch.compiler.is_compiling() and not (ids >= 0).all():
                raise ValueError("padding")
            return super().forward(ids, labels)

    assert modules(plan_of(Asking().train(), max_slowdown=1.0)) == ["head", "mlp.0", "mlp.1"]


def test_no_more_is_tiled_than_a_budget_needs() -> None:
    model = model_of()
    everything = plan_of(model, max_slowdown=1.0)
    loss = plan_of(model, max_slowdown=0.0)
    assert modules(loss) == ["head"] and loss.slowdown == 0.0
    assert plan_of(model, max_memory=everything.peak_before).tiles == ()
    assert modules(plan_of(model, max_memory=loss.peak, max_slowdown=1.0)) == ["head"]
    share = (everything.peak + 1) / everything.peak_before
    found = plan_of(model, max_memory=share, max_slowdown=1.0)
    assert found == everything


def test_as_many_layers_as_the_slowdown_allows() -> None:
    model = model_of(layers=4)
    whole = plan_of(model, max_slowdown=1.0)
    part = plan_of(model, max_slowdown=0.6 * whole.slowdown)
    assert modules(part) == ["head", "mlp.0", "mlp.1"]
    assert part.slowdown == pytest.approx(whole.slowdown / 2)


def test_a_budget_may_ask_for_more_tiles() -> None:
    model = model_of()
    plan = plan_of(model, FEW, max_slowdown=1.0)
    finer = plan_of(model, FEW, max_memory=plan.peak - 1, max_slowdown=1.0)
    assert finer.peak < plan.peak
    assert all(one.tiles > few.tiles for one, few in zip(finer.tiles, plan.tiles, strict=True))


def test_a_budget_may_be_a_size_and_what_is_none_is_refused() -> None:
    model = model_of()
    plan = plan_training(model, (), batch(), "1GB")
    assert plan.tiles == () and plan.peak < 1e9
    with pytest.raises(ValueError, match="max_memory must be a number of bytes or a size"):
        plan_training(model, (), batch(), "a lot")
    with pytest.raises(ValueError, match="max_slowdown must be a number such as 0.1, 0 or more"):
        plan_training(model, (), batch(), 1000, -0.5)


def test_a_budget_that_nothing_meets_is_told_with_the_closest_plan() -> None:
    model = model_of()
    with pytest.raises(ValueError, match="max_memory 1000 .1000 bytes. is too little") as error:
        plan_of(model, FEW, max_memory=1000)
    assert "closest plan within max_slowdown 0.1 needs" in str(error.value)
    with pytest.raises(ValueError, match=r"max_slowdown 0\.\d\d would allow one that needs"):
        plan_of(model, FEW, max_memory=1000, max_slowdown=0.0)
    assert not any("forward" in vars(module) for module in model.modules())


def test_dropout_and_scaled_logits_are_walls() -> None:
    plan = plan_of(model_of(drop=0.1, scale=0.5), max_slowdown=1.0)
    assert modules(plan) == []
    assert ("Mlp", "aten.dropout.default has no rule along dimension 1") in plan.refused
    assert any("stands between the head and the loss" in why for _, why in plan.refused)
    still = plan_of(model_of(drop=0.0), max_slowdown=1.0)
    assert modules(still) == ["head", "mlp.0", "mlp.1"]


def test_a_plan_is_plain_data() -> None:
    plan = plan_of(model_of(), max_slowdown=1.0)
    assert TrainingPlan.from_json(plan.to_json()) == plan
    for wrong in ("[]", "{}", "no", '{"tiles": [{"name": "a"}], "refused": []}'):
        with pytest.raises(ValueError, match="no training plan"):
            TrainingPlan.from_json(wrong)
    with pytest.raises(ValueError, match="plan.peak must be an integer, got '3'"):
        TrainingPlan.from_json(json.dumps(json.loads(plan.to_json()) | {"peak": "3"}))


def test_autochunk_of_a_model_in_training() -> None:
    model = model_of()
    names = list(model.state_dict())
    whole = model(**batch())["loss"]
    chunked = autochunk(model, kwargs=batch(), max_memory=0.9)
    assert chunked is model and modules(chunked.plan) == ["head"]
    assert chunked.explain() == chunked.plan.explain() and list(chunked.state_dict()) == names
    torch.testing.assert_close(chunked(**batch())["loss"], whole)
    plan = chunked.plan
    chunked.remove()
    assert not any("forward" in vars(module) for module in model.modules())
    assert not hasattr(model, "plan")
    assert autochunk(model, kwargs=batch(), plan=plan).plan is plan
    model.remove()
    with pytest.raises(ValueError, match="plan is one for training, and the model is not"):
        autochunk(model.eval(), kwargs=batch(), plan=plan)
    with pytest.raises(ValueError, match="must be a TrainingPlan for a model in training"):
        autochunk(model.train(), kwargs=batch(), plan=ChunkPlan("", (), 0, 0, 0.0))


class Of(nn.Module):
    """A module of one function with a weight."""

    def __init__(
        self, fn: Callable[[Tensor, Tensor], Tensor], weight: Tensor | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH)) if weight is None else None
        self.foreign = [weight]  # hidden from the module
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.weight is not None else self.foreign[0]
        assert weight is not None
        return self.fn(x, weight)


class Around(nn.Module):
    def __init__(self, part: nn.Module, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.part = part
        if weight is not None:
            self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) + 1


def judged(part: nn.Module, weight: nn.Parameter | None = None) -> Candidate:
    around = Around(part, weight)
    captured = capture(around, (torch.randn(2, ROWS, WIDTH),), {})
    (found,) = [one for one in candidates(captured, around, Effects()) if one.module == "part"]
    return found


LEGAL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tokens apart": lambda x, w: F.gelu(x @ w) @ w.T,
    "norms": lambda x, w: F.rms_norm((x @ w).tanh(), (4 * WIDTH,)),
}
WALLS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "a mean over tokens": (lambda x, w: (x @ w) - (x @ w).mean((0, 1), keepdim=True), "own rows"),
    "a shift": (lambda x, w: (x @ w).roll(1, 1).roll(1, 0), "roll"),
    "positions": (
        lambda x, w: (x @ w) * torch.arange(x.shape[1])[:, None] * torch.arange(2)[:, None, None],
        "",
    ),
    "positions along the tokens": (
        lambda x, w: (x @ w) + torch.arange(x.shape[1])[:, None],
        "arange",
    ),
    "a share of the length": (lambda x, w: (x @ w) / x.shape[1] / x.shape[0], "number of rows"),
    "random": (lambda x, w: F.dropout(x @ w, 0.1), "dropout"),
    "a scan": (lambda x, w: (x @ w).cumsum(1).cumsum(0), "cumsum"),
}


@pytest.mark.parametrize("name", LEGAL)
def test_what_may_be_cut(name: str) -> None:
    found = judged(Of(LEGAL[name]))
    assert (found.reason, found.dim, found.rows) == ("", 1, ROWS)


@pytest.mark.parametrize("name", WALLS)
def test_what_may_not_be_cut(name: str) -> None:
    fn, operator = WALLS[name]
    reason = judged(Of(fn)).reason
    assert reason and operator in reason


def test_parameters_of_another_module_are_a_wall() -> None:
    weight = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH))
    found = judged(Of(LEGAL["tokens apart"], weight), weight)
    assert found.reason == "uses a parameter or a constant of another module"


def test_logits_that_others_read_are_a_wall() -> None:
    class Regular(Causal):
        def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            found = super().forward(ids, labels)
            return {"loss": found["loss"] + found["logits"].square().mean()}

    model = Regular()
    head = head_candidate(capture(model, (), batch()), model)
    assert head is not None and head.reason == "the loss is not alone in reading the logits"
    model.loss_function = other_loss
    head = head_candidate(capture(model, (), batch()), model)
    assert head is not None and head.reason


def other_loss(logits: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
    return F.cross_entropy(logits.view(-1, vocab_size), labels.view(-1))


def test_llama_gpt2_and_gemma() -> None:
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(64, (1, 256))
    words: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 999}
    words |= {"hidden_size": 16, "intermediate_size": 64, "num_key_value_heads": 2}
    kinds = {
        "Llama": ["lm_head", "model.layers.0.mlp", "model.layers.1.mlp"],
        "Gemma2": ["model.layers.0.mlp", "model.layers.1.mlp"],  # its logits are capped
        "GPT2": ["lm_head", "transformer.h.0.mlp.act", "transformer.h.1.mlp.act"],  # with dropout
    }
    for kind, right in kinds.items():
        config = getattr(transformers, f"{kind}Config")(**words, use_cache=False)
        name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
        model = getattr(transformers, name)(config).train()
        given = {"input_ids": ids, "labels": ids.clone()}
        plan = plan_training(model, kwargs=given, max_slowdown=1.0)
        assert modules(plan) == right, plan.explain()
        torch.manual_seed(0)
        whole = model(**given).loss
        with apply_training(model, plan):
            torch.manual_seed(0)  # for dropout
            torch.testing.assert_close(model(**given).loss, whole, rtol=1e-5, atol=1e-5)
