"""A chunked model: the model's own outputs, its own state, and the memory that its plan says."""

from __future__ import annotations

import gc
import inspect
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers import DynamicCache

from tests.dense import largest
from tests.graph.models import NAMES, TOKENS, model_and_inputs
from wf_backends.autochunk import ChunkedPart, ChunkPlan, autochunk
from wf_backends.graph import StorageTracker

ANY = 4.0  # slowdown: these models are small, and memory is the matter here
PART = asdict(ChunkedPart("a", "b", 0, 1, 4, 2, "layer"))


def measured_peak(model: nn.Module, kwargs: dict[str, Any]) -> int:
    """The live bytes of a real run beyond weights and inputs."""
    inputs = [v for v in kwargs.values() if isinstance(v, torch.Tensor)]
    gc.collect()
    with torch.no_grad(), StorageTracker((*model.parameters(), *model.buffers(), *inputs)) as seen:
        model(**kwargs)
    return seen.peak


def largest_difference(a: Any, b: Any) -> float:
    pairs = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    return largest(
        float((x - y).abs().max() / y.abs().max()) for x, y in pairs if torch.is_tensor(x)
    )


def in_float64(kwargs: dict[str, Any]) -> dict[str, Any]:
    floats = (k for k, v in kwargs.items() if torch.is_tensor(v) and v.is_floating_point())
    return kwargs | {name: kwargs[name].double() for name in floats}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_the_models_and_the_peak_is_the_plans(name: str, attention: str) -> None:
    model, kwargs = model_and_inputs(name, attention)
    chunked = autochunk(model, kwargs=kwargs, max_slowdown=ANY)
    plan = chunked.plan

    assert plan.peak_before == pytest.approx(measured_peak(model, kwargs), rel=0.05)
    assert plan.peak == pytest.approx(measured_peak(chunked, kwargs), rel=0.05)
    if attention == "eager":
        assert plan.saved > 0.5
    with torch.no_grad():
        assert largest_difference(chunked(**kwargs), model(**kwargs)) < 1e-5
        model.double()
        doubled = in_float64(kwargs)
        assert largest_difference(chunked(**doubled), model(**doubled)) < 1e-12


def test_the_trackers_peak_is_the_profilers() -> None:
    model, kwargs = model_and_inputs("gpt2", "eager")
    chunked = autochunk(model, kwargs=kwargs, max_slowdown=ANY)
    with torch.no_grad():
        peak = profiled_peak(lambda: chunked(**kwargs))
    assert chunked.plan.peak == pytest.approx(peak, rel=0.05)


def profiled_peak(run: Callable[[], object]) -> int:
    """The live bytes that torch's profiler sees allocated."""
    with torch.profiler.profile(profile_memory=True) as seen:
        run()
    live = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


@pytest.mark.parametrize("share", [0.7, 0.4, 0.2])
def test_a_budget_is_kept_with_no_more_slices_than_it_needs(share: float) -> None:
    model, kwargs = model_and_inputs("gpt2", "eager")
    chunked = autochunk(model, kwargs=kwargs, max_memory=share, max_slowdown=ANY)
    limit = share * chunked.plan.peak_before
    assert measured_peak(chunked, kwargs) <= limit
    assert chunked.plan.peak > 0.5 * limit


def test_a_model_that_fits_runs_as_it_is() -> None:
    model, kwargs = model_and_inputs("gpt2", "eager")
    chunked = autochunk(model, kwargs=kwargs, max_memory="1GB")
    assert chunked.plan.regions == ()
    assert chunked.plan.peak == chunked.plan.peak_before
    assert "nothing is sliced" in chunked.explain()


class Constant(nn.Module):
    """Has a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.tensor(3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.T).softmax(-1) @ x * self.factor


@pytest.mark.parametrize("model", [Constant(), nn.Identity()])
def test_constants_and_models_without_operators(model: nn.Module) -> None:
    x = torch.randn(128, 8)
    chunked = autochunk(model.eval(), (x,), max_slowdown=ANY)
    with torch.no_grad():
        torch.testing.assert_close(chunked(x), model(x))


def test_a_budget_that_the_graph_keeps_without_regions_is_kept() -> None:
    """Eager Python holds `first` to the end, the graph does not."""

    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = x * 2
            second = first + 1
            return second * 3

    x = torch.randn(256, 256)
    chunked = autochunk(Chain().eval(), (x,), max_memory=0.8, max_slowdown=ANY)
    assert measured_peak(chunked, {"x": x}) <= 0.8 * chunked.plan.peak_before


def test_a_number_that_the_model_makes_a_tensor_of_is_known() -> None:
    """As DeBERTa does with the span of its relative positions."""

    class Span(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            span = torch.tensor(min(len(x), 100))
            near = x[100 - span : 100 + span]
            return (near @ near.T).softmax(-1) @ near

    model, x = Span().eval(), torch.randn(256, 8)
    chunked = autochunk(model, (x,), max_slowdown=ANY)
    assert chunked.plan.regions
    assert chunked.plan.peak_before == pytest.approx(measured_peak(model, {"x": x}), rel=0.05)
    with torch.no_grad():
        torch.testing.assert_close(chunked(x), model(x))


def test_class_state_and_hooks_are_shared_and_the_model_is_unchanged() -> None:
    model, kwargs = model_and_inputs("gpt2", "eager")
    before = dict(model.__dict__)
    chunked = autochunk(model, kwargs=kwargs, max_slowdown=ANY)

    assert dict(model.__dict__) == before
    assert type(chunked) is type(model)
    assert chunked.config is model.config
    assert list(chunked.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(chunked.parameters(), model.parameters(), strict=True))
    seen = []
    chunked.register_forward_hook(lambda *_: seen.append("hook"))
    with torch.no_grad():
        chunked(**kwargs)
        assert seen == ["hook"]
        model.h[0].mlp.c_fc.weight.mul_(2)  # weights are read at every call
        assert largest_difference(chunked(**kwargs), model(**kwargs)) < 1e-6
        model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})
        assert largest_difference(chunked(**kwargs), model(**kwargs)) < 1e-6


def test_another_shape_is_planned_at_its_first_call_and_kept() -> None:
    model, kwargs = model_and_inputs("gpt2", "eager")
    chunked = autochunk(model, kwargs=kwargs, max_memory=0.5, max_slowdown=ANY)
    first, other = chunked.plan, torch.randint(0, 90, (2, TOKENS // 2))
    with torch.no_grad():
        assert largest_difference(chunked(other), model(other)) == 0
        second = chunked.plan
        assert second.fingerprint != first.fingerprint
        chunked(other)
        assert chunked.plan is second


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_generate_runs_its_prefill_in_slices(name: str) -> None:
    """Mistral's window is shorter than the prompt: its cache counts more tokens than it keeps."""
    model, kwargs = model_and_inputs(name, "eager")
    chunked = autochunk(model, kwargs=kwargs, max_slowdown=ANY)
    same = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        expected = model.generate(kwargs["input_ids"], **same)
        assert torch.equal(chunked.generate(kwargs["input_ids"], **same), expected)
    assert chunked.plan.regions


def test_generate_gives_what_it_gives_the_model_with_padding_on_the_left() -> None:
    """Masks and positions: `generate` looks for them in the signature."""
    model, kwargs = model_and_inputs("llama", "sdpa")
    ids = kwargs["input_ids"].repeat(2, 1)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    given["attention_mask"][1, :100] = 0
    same = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        chunked = autochunk(model, kwargs=kwargs, max_slowdown=ANY)
        assert inspect.signature(chunked.forward) == inspect.signature(model.forward)
        assert torch.equal(chunked.generate(**given, **same), model.generate(**given, **same))
    assert chunked.plan.regions


def test_the_saving_holds_under_torch_compile() -> None:
    """inductor does not fuse across slices, nor keep all of them."""

    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ x.transpose(-1, -2)).softmax(-1) @ x

    model, x = Attention().eval(), torch.randn(1, 1024, 16)
    chunked = autochunk(model, (x,), max_memory=0.3, max_slowdown=ANY)
    assert chunked.plan.regions
    compiled = torch.compile(chunked)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        assert profiled_peak(lambda: compiled(x)) <= 1.05 * chunked.plan.peak


def test_a_decoding_step_beside_a_long_mask_is_not_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, kwargs = model_and_inputs("llama", "eager")
    chunked = autochunk(model, kwargs=kwargs, max_slowdown=ANY)
    monkeypatch.setattr("wf_backends.autochunk.planning.capture", pytest.fail)
    mask = torch.ones_like(kwargs["input_ids"])
    with torch.no_grad():
        chunked(input_ids=kwargs["input_ids"][:, :1], attention_mask=mask[:, :1])
        chunked(input_ids=kwargs["input_ids"][:, :1], attention_mask=mask)


def test_a_cache_that_is_given_is_filled() -> None:
    model, kwargs = model_and_inputs("llama", "eager")
    chunked = autochunk(model, kwargs=kwargs, max_slowdown=ANY)
    ours, theirs = DynamicCache(), DynamicCache()
    with torch.no_grad():
        for ids in kwargs["input_ids"].split(TOKENS // 2, dim=1):
            found = chunked(ids, past_key_values=ours, use_cache=True).logits
            expected = model(ids, past_key_values=theirs, use_cache=True).logits
            assert chunked.plan.regions
            torch.testing.assert_close(found, expected)
            assert ours.get_seq_length() == theirs.get_seq_length() > 0
    assert largest_difference(ours, theirs) < 1e-6


class Scores(nn.Module):
    """Fills a list and a dict that it is given."""

    def forward(self, x: torch.Tensor, kept: list, by_name: dict) -> torch.Tensor:
        kept.append((x @ x.transpose(-1, -2)).softmax(-1) @ x)
        by_name["last"] = kept[-1] + 1
        return kept[-1] * 2


def test_lists_and_dicts_that_are_given_are_filled() -> None:
    x, kept, by_name = torch.randn(1, 256, 16), [torch.ones(1)], {"old": torch.ones(1)}
    model = Scores().eval()
    chunked = autochunk(model, (x, [torch.ones(1)], by_name), max_memory=0.6, max_slowdown=ANY)
    assert chunked.plan.regions and list(by_name) == ["old"]
    with torch.no_grad():
        out = chunked(x, kept, by_name)
    assert len(kept) == 2 and list(by_name) == ["old", "last"]
    torch.testing.assert_close((kept[1] * 2, by_name["last"]), (out, kept[1] + 1))


def test_a_share_is_one_of_the_inputs_that_were_planned_first() -> None:
    model, kwargs = model_and_inputs("gpt2", "eager")
    chunked = autochunk(model, kwargs=kwargs, max_memory=0.4, max_slowdown=ANY)
    assert chunked.plan.regions
    with torch.no_grad():
        chunked(kwargs["input_ids"][:, : TOKENS // 4])
    assert not chunked.plan.regions  # it fits, and runs as it is


def test_hooks_of_the_model_run_once() -> None:
    model, kwargs = model_and_inputs("gpt2", "eager")
    model.register_forward_pre_hook(lambda _, args, kwargs: None, with_kwargs=True)
    model.register_forward_hook(lambda *_: {"hidden": _[2].last_hidden_state * 2})
    chunked = autochunk(model, kwargs=kwargs, max_memory=0.5, max_slowdown=ANY)
    assert chunked.plan.regions
    with torch.no_grad():
        assert largest_difference(chunked(**kwargs), model(**kwargs)) < 1e-6


def test_with_gradients_the_model_runs_unchunked_and_says_so() -> None:
    model, kwargs = model_and_inputs("gpt2", "eager")
    chunked = autochunk(model, kwargs=kwargs, max_slowdown=ANY)
    with pytest.warns(UserWarning, match="gradients are enabled: the model runs unchunked"):
        chunked(**kwargs).last_hidden_state.sum().backward()
    assert model.wpe.weight.grad is not None


def test_a_plan_goes_through_json_and_is_given_again() -> None:
    model, kwargs = model_and_inputs("gpt2", "eager")
    plan = autochunk(model, kwargs=kwargs, max_memory=0.3, max_slowdown=ANY).plan
    assert ChunkPlan.from_json(plan.to_json()) == plan
    again = autochunk(model, kwargs=kwargs, plan=plan)
    assert again.plan == plan
    assert measured_peak(again, kwargs) == pytest.approx(plan.peak, rel=0.05)


class TestRefusals:
    def test_a_budget_that_nothing_fits_names_the_closest_plan(self) -> None:
        model, kwargs = model_and_inputs("gpt2", "eager")
        with pytest.raises(ValueError, match=r"max_memory=1000 bytes: no plan fits. The closest"):
            autochunk(model, kwargs=kwargs, max_memory=1000, max_slowdown=ANY)

    def test_what_the_closest_plan_needs_is_enough(self) -> None:
        """A region that is built may need more than was predicted."""
        model, x = nn.Sequential(Constant(), Constant()).eval(), torch.randn(128, 8)
        with pytest.raises(ValueError, match="The closest one needs") as refused:
            autochunk(model, (x,), max_memory=0.01, max_slowdown=1e9)
        least = int(str(refused.value).split("needs ")[1].split()[0])
        assert autochunk(model, (x,), max_memory=least, max_slowdown=1e9).plan.peak == least

    def test_the_closest_plan_is_not_the_one_of_the_smallest_budget(self) -> None:
        """For which a region of another kind is chosen first, and needs more in the end."""
        model, kwargs = model_and_inputs("mistral", "sdpa")
        with pytest.raises(ValueError, match="The closest one needs") as refused:
            autochunk(model, kwargs=kwargs, max_memory=1, max_slowdown=ANY)
        told = int(str(refused.value).split("needs ")[1].split()[0])
        assert told <= autochunk(model, kwargs=kwargs, max_memory=None, max_slowdown=ANY).plan.peak

    def test_a_budget_that_only_a_slow_plan_fits_says_how_slow(self) -> None:
        model, kwargs = model_and_inputs("gpt2", "eager")
        with pytest.raises(ValueError, match=r"only with a predicted slowdown of .*max_slowdown=0"):
            autochunk(model, kwargs=kwargs, max_memory=0.15, max_slowdown=0)

    @pytest.mark.parametrize("size", ["2 pieces", 1.5, 0.0, -1, float("nan"), [1]])
    def test_a_size_that_is_none(self, size: Any) -> None:
        model, kwargs = model_and_inputs("gpt2", "eager")
        with pytest.raises(ValueError, match="max_memory"):
            autochunk(model, kwargs=kwargs, max_memory=size)

    @pytest.mark.parametrize("slowdown", [-0.1, float("nan"), "fast", True, None])
    def test_a_slowdown_that_is_none(self, slowdown: Any) -> None:
        model, kwargs = model_and_inputs("gpt2", "eager")
        with pytest.raises(ValueError, match="max_slowdown"):
            autochunk(model, kwargs=kwargs, max_slowdown=slowdown)

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            ({"args": torch.ones(2)}, "args must be a tuple .*got a Tensor"),
            ({"kwargs": [1]}, "kwargs must be a dict .*got a list"),
            ({"plan": {"regions": []}}, "plan must be a plan: ChunkPlan.from_json.*got a dict"),
            ({"model": "gpt2"}, "model must be a torch.nn.Module, got a str"),
        ],
    )
    def test_what_is_of_another_type(self, words: dict[str, Any], told: str) -> None:
        model, kwargs = model_and_inputs("gpt2", "eager")
        with pytest.raises(ValueError, match=told):
            autochunk(**{"model": model, "kwargs": kwargs} | words)

    def test_a_plan_of_another_model(self) -> None:
        model, kwargs = model_and_inputs("gpt2", "eager")
        other, inputs = model_and_inputs("opt", "eager")
        plan = autochunk(other, kwargs=inputs, max_slowdown=ANY).plan
        with pytest.raises(ValueError, match="plan was made for another model or other input"):
            autochunk(model, kwargs=kwargs, plan=plan)

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            ("", "no chunk plan .*Expecting value"),
            ("3", "plan must be an object"),
            ({"peak": None}, "plan.peak must be an integer, got None"),
            ({"peak": -1}, "plan.peak must be 0 or more, got -1"),
            ({"peak": ...}, "plan: 'peak' is missing"),
            ({"peeks": 3}, "plan has no key 'peeks'; did you mean 'peak'"),
            ({"slowdown": float("nan")}, "plan.slowdown must be a finite number, got nan"),
            ({"copied": "all"}, "plan.copied must be one of .*got 'all'"),
            ({"walls": [["sort"]]}, r"plan.walls\[0\] must have 2 items"),
            ({"regions": {}}, "plan.regions must be a list"),
            ({"regions": [1]}, r"plan.regions\[0\] must be an object"),
            ({"regions": [PART | {"dim": True}]}, r"regions\[0\].dim must be an integer, got True"),
            ({"regions": [PART | {"length": 0}]}, r"regions\[0\].length must be 1 or more, got 0"),
        ],
    )
    def test_a_text_that_is_no_plan(self, words: Any, told: str) -> None:
        if isinstance(words, dict):
            whole = asdict(ChunkPlan("f", (), 1, 2, 0.0)) | words
            words = json.dumps({key: value for key, value in whole.items() if value is not ...})
        with pytest.raises(ValueError, match=told):
            ChunkPlan.from_json(words)

    def test_a_plan_whose_regions_overlap(self) -> None:
        x = torch.randn(128, 8)
        plan = autochunk(Constant().eval(), (x,), max_slowdown=ANY).plan
        twice = replace(plan, regions=plan.regions * 2)
        with pytest.raises(ValueError, match="the plan's regions .* overlap"):
            autochunk(Constant().eval(), (x,), plan=twice)

    def test_control_flow_by_values_names_the_reason(
        self, capfd: pytest.CaptureFixture[str]
    ) -> None:
        class Branching(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * 2 if x.sum() > 0 else x

        with pytest.raises(ValueError, match="Branching cannot be captured: .*data-dependent"):
            autochunk(Branching(), (torch.randn(8, 8),))
        assert capfd.readouterr() == ("", "")  # the error says it all

    def test_an_error_of_pythons_own_names_the_models_line(self) -> None:
        class Counting(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * len(set(x[0].long().tolist()))

        told = r"Counting cannot be captured: unhashable .*, in forward: return x \* len\(set"
        with pytest.raises(ValueError, match=told):
            autochunk(Counting(), (torch.randn(8, 8),))

    @pytest.mark.parametrize("training", [False, True])
    def test_rows_whose_number_the_values_decide(self, training: bool) -> None:
        class Routed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.expert = nn.Linear(8, 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.expert(x[torch.nonzero(x[:, 0] > 0)[:, 0]])

        told = "Routed cannot be captured: what aten.nonzero.default gives depends on the values"
        with pytest.raises(ValueError, match=told):
            autochunk(Routed().train(training), (torch.randn(8, 8),))

    def test_what_has_no_fake_tensors(self, capfd: pytest.CaptureFixture[str]) -> None:
        class Sparse(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.sparse.mm(torch.eye(8).to_sparse(), x)

        with pytest.raises(ValueError, match="Sparse cannot run on fake tensors: .*Sparse"):
            autochunk(Sparse().eval(), (torch.randn(8, 8),))
        assert capfd.readouterr() == ("", "")

    @pytest.mark.parametrize("args", [(), (torch.ones(8), 1, 2)])
    def test_arguments_that_the_forward_does_not_take(self, args: tuple[Any, ...]) -> None:
        with pytest.raises(ValueError, match="not arguments of Linear.forward: .*argument"):
            autochunk(nn.Linear(8, 8).eval(), args)

    def test_a_model_that_changes_its_buffers(self) -> None:
        class Counting(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.calls.add_(1)
                return x * self.calls

        with pytest.raises(ValueError, match="Counting changes b_calls in its forward"):
            autochunk(Counting(), (torch.randn(8, 8),))

    def test_a_model_that_writes_into_a_buffer(self) -> None:
        class Keeping(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("sums", torch.zeros(8, 4))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.add(x, x, out=self.sums).relu()

        with pytest.raises(ValueError, match="Keeping changes b_sums in its forward"):
            autochunk(Keeping(), (torch.randn(8, 4),), max_memory=0.5)
