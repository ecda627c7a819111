"""What autochunk refuses, and that the error names the reason: budgets, plans, models."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.autochunk.graph.models import model_and_inputs
from tests.autochunk.helpers import ANY_SLOWDOWN, Lambda, TensorConstant, relative_error
from wf_backends.autochunk import ChunkedPart, ChunkPlan, autochunk

PART = asdict(ChunkedPart("a", "b", dim=0, length=1, rows=4, operators=2, where="layer"))


def bytes_of_the_closest_plan(model: nn.Module, **arguments: Any) -> int:
    """The number of bytes that the refusal of a budget names."""
    with pytest.raises(ValueError, match="The closest one needs") as refusal:
        autochunk(model, **arguments)
    return int(str(refusal.value).split("needs ")[1].split()[0])


class TestBudgets:
    def test_budget_below_every_plan_names_the_closest_plan(self) -> None:
        model, kwargs = model_and_inputs("gpt2", "eager")
        with pytest.raises(ValueError, match=r"max_memory=1000 bytes: no plan fits. The closest"):
            autochunk(model, kwargs=kwargs, max_memory=1000, max_slowdown=ANY_SLOWDOWN)

    def test_bytes_of_the_closest_plan_are_a_sufficient_budget(self) -> None:
        """A region that is built may need more than was predicted."""
        model, x = nn.Sequential(TensorConstant(), TensorConstant()).eval(), torch.randn(128, 8)
        needed = bytes_of_the_closest_plan(model, args=(x,), max_memory=0.01, max_slowdown=1e9)
        assert autochunk(model, (x,), max_memory=needed, max_slowdown=1e9).plan.peak == needed

    def test_closest_plan_needs_no_more_than_the_plan_without_a_budget(self) -> None:
        """With the smallest budget the search takes another region first and ends higher."""
        model, kwargs = model_and_inputs("mistral", "sdpa")
        arguments: dict[str, Any] = {"kwargs": kwargs, "max_slowdown": ANY_SLOWDOWN}
        needed = bytes_of_the_closest_plan(model, max_memory=1, **arguments)
        assert needed <= autochunk(model, max_memory=None, **arguments).plan.peak

    def test_budget_that_only_a_slow_plan_keeps_names_its_slowdown(self) -> None:
        model, kwargs = model_and_inputs("gpt2", "eager")
        with pytest.raises(ValueError, match=r"only with a predicted slowdown of .*max_slowdown=0"):
            autochunk(model, kwargs=kwargs, max_memory=0.15, max_slowdown=0)

    @pytest.mark.parametrize("size", ["2 pieces", 1.5, 0.0, -1, float("nan"), [1]])
    def test_max_memory_that_is_no_size(self, size: Any) -> None:
        model, kwargs = model_and_inputs("gpt2", "eager")
        with pytest.raises(ValueError, match="max_memory"):
            autochunk(model, kwargs=kwargs, max_memory=size)

    @pytest.mark.parametrize("slowdown", [-0.1, float("nan"), "fast", True, None])
    def test_max_slowdown_that_is_no_number_from_0(self, slowdown: Any) -> None:
        model, kwargs = model_and_inputs("gpt2", "eager")
        with pytest.raises(ValueError, match="max_slowdown"):
            autochunk(model, kwargs=kwargs, max_slowdown=slowdown)


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"args": torch.ones(2)}, "args must be a tuple .*got a Tensor"),
            ({"kwargs": [1]}, "kwargs must be a dict .*got a list"),
            ({"plan": {"regions": []}}, "plan must be a plan: ChunkPlan.from_json.*got a dict"),
            ({"model": "gpt2"}, "model must be a torch.nn.Module, got a str"),
        ],
    )
    def test_argument_of_another_type(self, arguments: dict[str, Any], message: str) -> None:
        model, kwargs = model_and_inputs("gpt2", "eager")
        with pytest.raises(ValueError, match=message):
            autochunk(**{"model": model, "kwargs": kwargs} | arguments)

    @pytest.mark.parametrize("args", [(), (torch.ones(8), 1, 2)], ids=["too few", "too many"])
    def test_arguments_that_the_forward_does_not_accept(self, args: tuple[Any, ...]) -> None:
        with pytest.raises(ValueError, match="not arguments of Linear.forward: .*argument"):
            autochunk(nn.Linear(8, 8).eval(), args)


class TestPlans:
    def test_plan_of_another_model(self) -> None:
        model, kwargs = model_and_inputs("gpt2", "eager")
        other_model, other_kwargs = model_and_inputs("opt", "eager")
        plan = autochunk(other_model, kwargs=other_kwargs, max_slowdown=ANY_SLOWDOWN).plan
        with pytest.raises(ValueError, match="plan was made for another model .* or other input"):
            autochunk(model, kwargs=kwargs, plan=plan)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "no chunk plan .*Expecting value"),
            ("3", "plan must be an object"),
            ('{"peak": 1, "peak": 2}', "key 'peak' is given twice: 1 and 2"),
            ("[" * 99999, "no chunk plan .*recursion"),
        ],
        ids=["empty", "number", "key twice", "deep"],
    )
    def test_text_that_is_no_plan(self, text: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            ChunkPlan.from_json(text)

    def test_json_without_a_field(self) -> None:
        fields = asdict(ChunkPlan("f", (), 1, 2, 0.0))
        del fields["peak"]
        with pytest.raises(ValueError, match="plan: 'peak' is missing"):
            ChunkPlan.from_json(json.dumps(fields))

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"peak": None}, "plan.peak must be an integer, got None"),
            ({"peak": -1}, "plan.peak must be 0 or more, got -1"),
            ({"peeks": 3}, "plan: unknown key 'peeks'; did you mean 'peak'"),
            ({"slowdown": float("nan")}, "plan.slowdown must be a finite number, got nan"),
            ({"slowdown": -0.5}, "plan.slowdown must be 0 or more, got -0.5"),
            ({"copied": "all"}, "plan.copied must be one of .*got 'all'"),
            ({"walls": [["sort"]]}, r"plan.walls\[0\] must have 2 items"),
            ({"regions": {}}, "plan.regions must be a list"),
            ({"regions": [1]}, r"plan.regions\[0\] must be an object"),
            ({"regions": [PART | {"dim": True}]}, r"regions\[0\].dim must be an integer, got True"),
            ({"regions": [PART | {"length": 0}]}, r"regions\[0\].length must be 1 or more, got 0"),
        ],
    )
    def test_json_with_a_wrong_field(self, fields: dict[str, Any], message: str) -> None:
        text = json.dumps(asdict(ChunkPlan("f", (), 1, 2, 0.0)) | fields)
        with pytest.raises(ValueError, match=message):
            ChunkPlan.from_json(text)

    def test_regions_that_overlap(self) -> None:
        x = torch.randn(128, 8)
        plan = autochunk(TensorConstant().eval(), (x,), max_slowdown=ANY_SLOWDOWN).plan
        overlapping = replace(plan, regions=plan.regions * 2)
        with pytest.raises(ValueError, match="the plan's regions .* overlap"):
            autochunk(TensorConstant().eval(), (x,), plan=overlapping)


class TestModels:
    def test_control_flow_that_depends_on_values(self, capfd: pytest.CaptureFixture[str]) -> None:
        class Branching(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * 2 if x.sum() > 0 else x

        with pytest.raises(ValueError, match="Branching cannot be captured: .*data-dependent"):
            autochunk(Branching(), (torch.randn(8, 8),))
        assert capfd.readouterr() == ("", "")  # torch.export's own log is suppressed

    def test_the_line_named_is_the_models_and_not_one_of_pythons_library(self) -> None:
        class Copying(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + copy.deepcopy(x)

        with pytest.raises(ValueError, match=r"in forward: return x \+ copy.deepcopy\(x\)"):
            autochunk(Copying(), (torch.randn(8, 8),))

    def test_python_error_names_the_models_line(self) -> None:
        class Counting(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * len(set(x[0].long().tolist()))

        message = r"Counting cannot be captured: unhashable .*, in forward: return x \* len\(set"
        with pytest.raises(ValueError, match=message):
            autochunk(Counting().eval(), (torch.randn(8, 8),))

    @pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
    def test_number_of_rows_that_depends_on_values(self, training: bool) -> None:
        class Routed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.expert = nn.Linear(8, 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.expert(x[torch.nonzero(x[:, 0] > 0)[:, 0]])

        message = "Routed cannot be captured: what aten.nonzero.default gives depends on the values"
        with pytest.raises(ValueError, match=message):
            autochunk(Routed().train(training), (torch.randn(8, 8),))

    def test_operator_without_fake_tensors(self, capfd: pytest.CaptureFixture[str]) -> None:
        class Sparse(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.sparse.mm(torch.eye(8).to_sparse(), x)

        with pytest.raises(ValueError, match="Sparse cannot run on fake tensors: .*Sparse"):
            autochunk(Sparse().eval(), (torch.randn(8, 8),))
        assert capfd.readouterr() == ("", "")

    def test_buffer_that_the_forward_updates(self) -> None:
        class Counting(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.calls.add_(1)
                return x * self.calls

        with pytest.raises(ValueError, match="Counting changes b_calls in its forward"):
            autochunk(Counting().eval(), (torch.randn(8, 8),))

    def test_buffer_that_is_an_operators_out_argument(self) -> None:
        class Keeping(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("sums", torch.zeros(8, 4))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.add(x, x, out=self.sums).relu()

        with pytest.raises(ValueError, match="Keeping changes b_sums in its forward"):
            autochunk(Keeping().eval(), (torch.randn(8, 4),), max_memory=0.5)

    @pytest.mark.parametrize("transform", ["vmap", "jvp"])
    def test_transform_of_torch_func(self, transform: str) -> None:
        def forward(x: torch.Tensor, linear: nn.Module) -> torch.Tensor:
            if transform == "vmap":
                return torch.vmap(lambda row: linear(row).cumsum(0))(x)
            return torch.func.jvp(linear, (x,), (torch.ones_like(x),))[1]

        with pytest.raises(ValueError, match=r"Lambda cannot be captured: torch.func .*vmap"):
            autochunk(Lambda(forward, nn.Linear(8, 8)).eval(), (torch.randn(64, 8),))

    @pytest.mark.parametrize("offload", ["cpu_offload_with_hook", "cpu_offload"])
    def test_weights_that_accelerate_moves(self, offload: str) -> None:
        accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
        model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), torch.randn(512, 8)
        getattr(accelerate, offload)(model, "cpu")
        with pytest.raises(
            ValueError, match=r"accelerate's \w+ of .* enable_model_cpu_offload\(\)"
        ):
            autochunk(model, (x,), max_slowdown=ANY_SLOWDOWN)

    def test_weights_that_diffusers_casts(self) -> None:
        hooks = pytest.importorskip("diffusers.hooks", reason="diffusers is not installed")
        model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), torch.randn(512, 8)
        dtypes = {"storage_dtype": torch.bfloat16, "compute_dtype": torch.float32}
        hooks.apply_layerwise_casting(model, **dtypes, non_blocking=False)
        with pytest.raises(ValueError, match="LayerwiseCastingHook of 0 moves or casts weights"):
            autochunk(model, (x,), max_slowdown=ANY_SLOWDOWN)

    def test_cache_of_diffusers(self) -> None:
        """In slices, every step would compute the attention that the cache was to skip."""
        diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
        heads = {"num_attention_heads": 2, "attention_head_dim": 12}
        width = {"in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 16}
        model = diffusers.WanTransformer3DModel(**heads, **width, num_layers=1).eval()
        inputs = torch.randn(1, 4, 1, 8, 8), torch.tensor([3]), torch.randn(1, 7, 16)
        chunked = autochunk(model, inputs, max_slowdown=ANY_SLOWDOWN)
        options: dict[str, Any] = {"spatial_attention_block_identifiers": ("blocks",)}
        cache = diffusers.PyramidAttentionBroadcastConfig(
            2, current_timestep_callback=lambda: 500, **options
        )
        chunked.enable_cache(cache)
        with torch.no_grad():
            with pytest.raises(ValueError, match=r"Hook of blocks.0.attn1 keeps .*disable_cache"):
                chunked(*inputs)
            chunked.disable_cache()
            assert relative_error(chunked(*inputs), model(*inputs)) < 1e-5
