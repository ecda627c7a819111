"""Mixtures of experts: a layer's experts are one operator that is sliced by tokens.

In inference (regions) and in training (tiles); the reference is the unchunked model.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from tests.autochunk.helpers import measured_peak
from tests.autochunk.slicing.slicing import assert_slices
from wf_backends.autochunk import ChunkPlan, autochunk
from wf_backends.autochunk.graph import Experts, capture
from wf_backends.autochunk.slicing import sources
from wf_backends.autochunk.tiling import plan_training

TOKENS, HIDDEN, INNER, NUM_EXPERTS, EXPERTS_PER_TOKEN = 512, 32, 96, 8, 3
UNLIMITED = 1e9  # max_slowdown


class GroupedExperts(nn.Module):
    """Experts as in transformers 5: tokens are sorted by expert. In float32."""

    dtype = torch.float32

    def __init__(self, inner: int = INNER) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, inner) / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, inner, HIDDEN) / inner**0.5)
        self.act = nn.SiLU()

    def _apply_gate(self, x: Tensor) -> Tensor:
        return self.act(x)

    def products(self, rows: Tensor, weight: Tensor, offsets: Tensor, experts: Tensor) -> Tensor:
        return F.grouped_mm(rows, weight, offs=offsets)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        experts, order = top_k_index.flatten().sort()
        counts = torch.histc(experts.float(), NUM_EXPERTS, 0, NUM_EXPERTS - 1)
        offsets = counts.cumsum(0, dtype=torch.int32)
        rows = hidden_states[order // top_k_index.shape[1]]
        rows = self._apply_gate(self.products(rows, self.up, offsets, experts))
        rows = self.products(rows, self.down, offsets, experts)
        inverse_order = torch.empty_like(order)
        inverse_order[order] = torch.arange(len(order))
        rows = (rows * top_k_weights.flatten()[order, None])[inverse_order]
        return rows.view(*top_k_index.shape, -1).sum(1)


class Float64Experts(GroupedExperts):
    """The same in float64, which `grouped_mm` does not support."""

    dtype = torch.float64

    def products(self, rows: Tensor, weight: Tensor, offsets: Tensor, experts: Tensor) -> Tensor:
        return torch.bmm(rows[:, None], weight[experts]).squeeze(1)


class ExpertsWithTokens(GroupedExperts):
    """Only experts that some token chose, as transformers' "eager" experts."""

    def products(self, rows: Tensor, weight: Tensor, offsets: Tensor, experts: Tensor) -> Tensor:
        return F.grouped_mm(rows, weight, offs=offsets[experts.unique()])


class Layer(nn.Module):
    def __init__(self, experts: nn.Module, shared_expert: bool) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, NUM_EXPERTS)
        self.experts = experts
        self.shared_expert = nn.Linear(HIDDEN, HIDDEN) if shared_expert else None

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x).flatten(0, 1)
        weights, index = self.router(normed).softmax(-1).topk(EXPERTS_PER_TOKEN)
        out = self.experts(normed, index, weights)
        if self.shared_expert:
            out = out + self.shared_expert(normed)
        return x + out.view_as(x)


def model_and_input(
    experts: type[GroupedExperts],
    shared_expert: bool = False,
    inner: tuple[int, ...] = (INNER,) * 3,
) -> tuple[nn.Sequential, Tensor]:
    """A model of one layer for each inner width, and its hidden states."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(experts(width), shared_expert) for width in inner))
    x = torch.randn(2, TOKENS // 2, HIDDEN, dtype=experts.dtype)
    return model.to(experts.dtype).eval(), x


def experts_operators(model: nn.Module, x: Tensor) -> list[Experts]:
    graph = capture(model, (x,), {}).graph
    return [node.target for node in graph.nodes if isinstance(node.target, Experts)]


def test_experts_whose_sizes_depend_on_values_are_refused_by_their_line() -> None:
    model, x = model_and_input(ExpertsWithTokens)
    with pytest.raises(ValueError, match=r"cannot run on fake tensors: .*experts.unique\(\)"):
        plan_training(model.train(), (x,))


@pytest.mark.parametrize(
    ("experts", "tolerance"), [(Float64Experts, 1e-12), (GroupedExperts, 1e-5)]
)
@pytest.mark.parametrize("shared_expert", [False, True], ids=["no shared expert", "shared expert"])
def test_experts_are_sliced_by_tokens(
    experts: type[GroupedExperts], tolerance: float, shared_expert: bool
) -> None:
    model, x = model_and_input(experts, shared_expert)
    chunked = autochunk(model, (x,), max_memory=0.3, max_slowdown=UNLIMITED)
    plan = chunked.plan
    assert {"experts", "experts_1"} <= {part.first for part in plan.regions}
    assert plan.peak_before == pytest.approx(measured_peak(model, {"input": x}), rel=0.05)
    assert plan.peak == pytest.approx(measured_peak(chunked, {"input": x}), rel=0.05)
    assert plan.peak <= 0.3 * plan.peak_before
    planned = autochunk(model, (x,), plan=ChunkPlan.from_json(plan.to_json()))
    with torch.no_grad():
        out = chunked(x)
        torch.testing.assert_close(out, model(x), rtol=tolerance, atol=tolerance)
        assert torch.equal(planned(x), out)


def test_each_layer_computes_with_its_own_weights() -> None:
    model, x = model_and_input(Float64Experts)
    chunked = autochunk(model, (x,), max_memory=0.3, max_slowdown=UNLIMITED)
    with torch.no_grad():
        model[2].experts.up.mul_(1.5)
        torch.testing.assert_close(chunked(x), model(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("inner", [(96, 96, 96), (96, 96, 48)], ids=str)
def test_layers_that_differ_in_sizes_alone_share_one_operator(inner: tuple[int, ...]) -> None:
    operators = experts_operators(*model_and_input(Float64Experts, inner=inner))
    assert len(operators) == 3 and len(set(operators)) == 1


def test_layers_with_different_activations_have_different_operators() -> None:
    model, x = model_and_input(Float64Experts)
    model[1].experts.act = nn.ReLU()
    model[2].experts.act = nn.LeakyReLU(0.3)
    assert len(set(experts_operators(model, x))) == 3


def test_experts_with_a_hook_or_a_replaced_forward_are_traced_operator_by_operator() -> None:
    model, x = model_and_input(Float64Experts)
    model[0].experts.register_forward_hook(lambda *_: None)
    model[1].experts.forward = model[1].experts.forward
    assert len(experts_operators(model, x)) == 1
    assert "forward" not in vars(model[2].experts)


def test_module_with_the_arguments_of_experts_that_mixes_tokens_is_not_sliced_as_experts() -> None:
    class CapacityLimited(nn.Module):
        """Passes the first few tokens of each expert: a token depends on those before it."""

        def forward(
            self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
        ) -> Tensor:
            one_hot = F.one_hot(top_k_index[:, 0], NUM_EXPERTS)
            position = one_hot.cumsum(0).gather(1, top_k_index[:, :1])
            return hidden_states * (position < 8) * top_k_weights[:, :1]

    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(CapacityLimited(), False) for _ in range(2))).double().eval()
    x = torch.randn(2, TOKENS // 2, HIDDEN).double()
    assert not experts_operators(model, x)
    chunked = autochunk(model, (x,), max_slowdown=UNLIMITED)
    with torch.no_grad():
        torch.testing.assert_close(chunked(x), model(x), rtol=1e-12, atol=1e-12)


def test_rule_slices_tokens_and_reads_all_weights() -> None:
    model, x = model_and_input(Float64Experts)
    graph = capture(model, (x,), {}).graph
    node = next(node for node in graph.nodes if isinstance(node.target, Experts))
    assert [source.dim for source in sources(node, 0) or ()] == [0, 0, 0, None, None]
    assert sources(node, 1) is None

    normed = x.flatten(0, 1)
    weights, index = torch.rand(TOKENS, NUM_EXPERTS).double().topk(EXPERTS_PER_TOKEN)
    parameters = [model[0].experts.up, model[0].experts.down]
    inputs = zip(node.all_input_nodes, (normed, index, weights, *parameters), strict=True)
    expected = node.target(normed, index, weights, parameters)
    assert_slices(node, 0, expected, dict(inputs).__getitem__, seed=0)


@pytest.mark.parametrize(
    ("experts", "tolerance"), [(Float64Experts, 1e-10), (GroupedExperts, 1e-4)]
)
def test_training_tiles_the_experts_with_the_gradients_of_the_model(
    experts: type[GroupedExperts], tolerance: float
) -> None:
    model, x = model_and_input(experts)
    model.train()
    model(x).square().sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    tiled = autochunk(model, (x,), max_slowdown=0.5)
    assert {tiles.module for tiles in tiled.plan.tiles} == {f"{i}.experts" for i in range(3)}
    assert tiled.plan.peak < 0.5 * tiled.plan.peak_before
    tiled(x).square().sum().backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=tolerance, atol=tolerance)


FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 8},
    "Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 96, "head_dim": 8},
    "Qwen2Moe": {"num_experts": 8, "moe_intermediate_size": 96},
    "DeepseekV3": {
        "n_routed_experts": 8, "moe_intermediate_size": 96, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 8,
    },
    "GptOss": {"num_local_experts": 8, "head_dim": 8, "attn_implementation": "eager"},
    "Glm4Moe": {"n_routed_experts": 8, "moe_intermediate_size": 96, "first_k_dense_replace": 1},
}  # fmt: skip


@pytest.mark.skipif(
    int(transformers.__version__[0]) < 5, reason="the experts of transformers 4 cannot be captured"
)
@pytest.mark.parametrize("family", FAMILIES)
def test_mixtures_of_transformers_have_their_logits_and_the_predicted_peak(family: str) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=64, hidden_size=32, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, num_experts_per_tok=4, pad_token_id=0,
        **FAMILIES[family],
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    kwargs = {"input_ids": torch.randint(1, 64, (1, 256)), "use_cache": False}
    chunked = autochunk(model, (), kwargs, max_memory=0.6, max_slowdown=UNLIMITED)
    assert chunked.plan.peak == pytest.approx(measured_peak(chunked, kwargs), rel=0.05)
    with torch.no_grad():
        torch.testing.assert_close(
            chunked(**kwargs).logits, model(**kwargs).logits, rtol=1e-5, atol=1e-5
        )
