"""A layer's experts are one operator that is sliced by tokens, in inference and in training."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from tests.slicing.slicing import assert_slices
from wf_backends.autochunk import ChunkPlan, autochunk
from wf_backends.graph import StorageTracker, capture
from wf_backends.slicing import Experts, sources

TOKENS, HIDDEN, INNER, EXPERTS, CHOSEN = 512, 32, 96, 8, 3


class Grouped(nn.Module):
    """Experts as transformers 5 has them: tokens are sorted by expert."""

    def __init__(self, inner: int = INNER) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, inner) / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, inner, HIDDEN) / inner**0.5)
        self.act = nn.SiLU()

    def _apply_gate(self, x: Tensor) -> Tensor:
        return self.act(x)

    def products(self, x: Tensor, weight: Tensor, offsets: Tensor, experts: Tensor) -> Tensor:
        return F.grouped_mm(x, weight, offs=offsets)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        experts, order = top_k_index.flatten().sort()
        counts = torch.histc(experts.float(), EXPERTS, 0, EXPERTS - 1)
        of = counts.cumsum(0, dtype=torch.int32), experts
        rows = hidden_states[order // top_k_index.shape[1]]
        rows = self._apply_gate(self.products(rows, self.up, *of))
        rows = self.products(rows, self.down, *of)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        rows = (rows * top_k_weights.flatten()[order, None])[back]
        return rows.view(*top_k_index.shape, -1).sum(1)


class Exact(Grouped):
    """The same in float64, which `grouped_mm` does not take."""

    def products(self, x: Tensor, weight: Tensor, offsets: Tensor, experts: Tensor) -> Tensor:
        return torch.bmm(x[:, None], weight[experts]).squeeze(1)


class Layer(nn.Module):
    def __init__(self, experts: nn.Module, shared: bool) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, EXPERTS)
        self.experts = experts
        self.shared = nn.Linear(HIDDEN, HIDDEN) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).flatten(0, 1)
        weights, index = self.router(y).softmax(-1).topk(CHOSEN)
        found = self.experts(y, index, weights)
        return x + (found + self.shared(y) if self.shared else found).view_as(x)


def mixture(kind: type[Grouped], shared: bool = False, inner: tuple[int, ...] = (INNER,) * 3):
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(kind(size), shared) for size in inner))
    dtype = torch.float64 if kind is Exact else torch.float32
    return model.to(dtype).eval(), torch.randn(2, TOKENS // 2, HIDDEN, dtype=dtype)


def operators(model: nn.Module, x: Tensor) -> list[object]:
    graph = capture(model, (x,), {}).graph
    return [node.target for node in graph.nodes if isinstance(node.target, Experts)]


@pytest.mark.parametrize(("kind", "accuracy"), [(Exact, 1e-12), (Grouped, 1e-5)])
@pytest.mark.parametrize("shared", [False, True])
def test_experts_are_sliced_by_tokens(kind: type[Grouped], accuracy: float, shared: bool) -> None:
    model, x = mixture(kind, shared)
    chunked = autochunk(model, (x,), max_memory=0.3, max_slowdown=1e9)
    assert {"experts", "experts_1"} <= {part.first for part in chunked.plan.regions}
    with torch.no_grad():
        expected = model(x)
        with StorageTracker((*model.parameters(), x)) as plain:
            model(x)
        with StorageTracker((*model.parameters(), x)) as seen:
            found = chunked(x)
    torch.testing.assert_close(found, expected, rtol=accuracy, atol=accuracy)
    assert plain.peak == pytest.approx(chunked.plan.peak_before, rel=0.05)
    assert seen.peak == pytest.approx(chunked.plan.peak, rel=0.05)
    assert chunked.plan.peak <= 0.3 * chunked.plan.peak_before
    again = autochunk(model, (x,), plan=ChunkPlan.from_json(chunked.plan.to_json()))
    assert torch.equal(again(x), found)


def test_each_layer_computes_with_its_own_weights() -> None:
    model, x = mixture(Exact)
    chunked = autochunk(model, (x,), max_memory=0.3, max_slowdown=1e9)
    with torch.no_grad():
        model[2].experts.up.mul_(1.5)
        torch.testing.assert_close(chunked(x), model(x), rtol=1e-12, atol=1e-12)


def test_layers_that_are_alike_share_an_operator() -> None:
    assert len({*operators(*mixture(Exact))}) == 1
    assert len({*operators(*mixture(Exact, inner=(96, 96, 48)))}) == 1  # sizes are the arguments'
    model, x = mixture(Exact)
    model[1].experts.act = nn.ReLU()
    model[2].experts.act = nn.LeakyReLU(0.3)
    assert len({*operators(model, x)}) == 3


def test_experts_with_a_hook_or_a_forward_of_their_own_are_traced_as_they_are() -> None:
    model, x = mixture(Exact)
    model[0].experts.register_forward_hook(lambda *_: None)
    model[1].experts.forward = model[1].experts.forward
    assert len(operators(model, x)) == 1
    assert "forward" not in vars(model[2].experts)


def test_a_module_that_only_takes_the_same_arguments_is_no_mixture() -> None:
    class Dropping(nn.Module):
        """Of each expert's tokens it takes the first few: a token depends on those before it."""

        def forward(
            self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
        ) -> Tensor:
            before = F.one_hot(top_k_index[:, 0], EXPERTS).cumsum(0).gather(1, top_k_index[:, :1])
            return hidden_states * (before < 8) * top_k_weights[:, :1]

    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(Dropping(), False) for _ in range(2))).double().eval()
    x = torch.randn(2, TOKENS // 2, HIDDEN).double()
    assert not operators(model, x)
    chunked = autochunk(model, (x,), max_slowdown=1e9)
    with torch.no_grad():
        torch.testing.assert_close(chunked(x), model(x), rtol=1e-12, atol=1e-12)


def test_the_rule_for_experts_gives_the_rows_of_the_whole() -> None:
    model, x = mixture(Exact)
    captured = capture(model, (x,), {})
    node = next(n for n in captured.graph.nodes if isinstance(n.target, Experts))
    y, (weights, index) = x.flatten(0, 1), torch.rand(TOKENS, EXPERTS).double().topk(CHOSEN)
    own = [model[0].experts.up, model[0].experts.down]
    values = dict(zip(node.all_input_nodes, (y, index, weights, *own), strict=True))
    assert [s.dim for s in sources(node, 0) or ()] == [0, 0, 0, None, None]
    assert sources(node, 1) is None
    whole = node.target(y, index, weights, own)
    assert_slices(node, 0, whole, values.__getitem__, seed=0)


@pytest.mark.parametrize(("kind", "accuracy"), [(Exact, 1e-10), (Grouped, 1e-4)])
def test_training_tiles_the_experts_alone(kind: type[Grouped], accuracy: float) -> None:
    model, x = mixture(kind)
    model.train()
    model(x).square().sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    tiled = autochunk(model, (x,), max_slowdown=0.5)
    assert {one.module for one in tiled.plan.tiles} == {f"{i}.experts" for i in range(3)}
    assert tiled.plan.peak < 0.5 * tiled.plan.peak_before
    tiled(x).square().sum().backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=accuracy, atol=accuracy)


FAMILIES = {
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


@pytest.mark.skipif(int(transformers.__version__[0]) < 5, reason="experts that can be captured")
@pytest.mark.parametrize("family", FAMILIES)
def test_mixtures_of_transformers(family: str) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=64, hidden_size=32, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, num_experts_per_tok=4, pad_token_id=0,
        **FAMILIES[family],
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    words = {"input_ids": torch.randint(1, 64, (1, 256)), "use_cache": False}
    chunked = autochunk(model, (), words, max_memory=0.6, max_slowdown=1e9)
    with torch.no_grad():
        expected = model(**words).logits
        with StorageTracker((*model.parameters(), *model.buffers(), words["input_ids"])) as seen:
            found = chunked(**words).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert seen.peak == pytest.approx(chunked.plan.peak, rel=0.05)
