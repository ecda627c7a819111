"""The rules on graphs of real models: nothing raises, and every slice of every node is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves, tree_map

from tests.slicing.slicing import assert_slices, tensors
from wf_backends.slicing.group_norm import split_group_norms
from wf_backends.slicing.rules import sources

TOKENS: dict[str, Any] = {"input_ids": torch.arange(12).reshape(2, 6), "use_cache": False}
SIZES = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 12}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Also for what a model makes without naming a dtype, as GPT-2 its mask."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def gpt2(attention: str) -> tuple[nn.Module, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_embd=8, n_head=2, vocab_size=12, n_positions=8, attn_implementation=attention
    )
    return transformers.GPT2LMHeadModel(config), TOKENS


def llama(attention: str) -> tuple[nn.Module, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(
        **SIZES, **heads, vocab_size=12, attn_implementation=attention
    )
    return transformers.LlamaForCausalLM(config), TOKENS


def vit(attention: str) -> tuple[nn.Module, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    image = {"image_size": 8, "patch_size": 4}
    config = transformers.ViTConfig(
        **SIZES, **image, num_attention_heads=2, attn_implementation=attention
    )
    return transformers.ViTModel(config), {"pixel_values": torch.randn(2, 3, 8, 8)}


class ResNetBlock(nn.Module):
    """A UNet's block: group norm, SiLU, convolution, a step down and one up."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 4)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.down = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.up = nn.Conv2d(6, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x + self.conv(nn.functional.silu(self.norm(x)))
        return hidden + self.up(nn.functional.interpolate(self.down(hidden), scale_factor=2.0))


def resnet_block(_: str) -> tuple[nn.Module, dict[str, Any]]:
    return ResNetBlock(), {"x": torch.randn(2, 4, 8, 8)}


class Sliced(fx.Interpreter):
    """Runs a graph, and each node again by slices of every dimension that has a rule."""

    sliced: int = 0

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        before = {source: self.copy(source) for source in n.all_input_nodes}
        result = super().run_node(n)
        shape = getattr(tensors(result)[0] if result is not None else None, "shape", ())
        assert sources(n, len(shape)) is None
        for dim in range(len(shape)):
            if sources(n, dim) is not None:
                assert_slices(n, dim, result, lambda s: tree_map(torch.clone, before[s]), dim)
                self.sliced += 1
        return result

    def copy(self, node: fx.Node) -> Any:
        return tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, self.env[node])


def flat_inputs(program: ExportedProgram, kwargs: dict[str, Any]) -> list[Any]:
    """The values of the graph's placeholders: parameters, buffers, constants, arguments."""
    state = {**program.state_dict, **program.constants}
    given = iter(tree_leaves(kwargs))
    specs = program.graph_signature.input_specs
    return [state[s.target] if s.target is not None else next(given) for s in specs]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("make", [gpt2, llama, vit, resnet_block], ids=lambda make: make.__name__)
def test_every_slice_of_every_node_is_right(
    make: Callable[[str], tuple[nn.Module, dict[str, Any]]], attention: str
) -> None:
    torch.manual_seed(0)
    model, kwargs = make(attention)
    program = torch.export.export(model.eval(), (), kwargs, strict=False)
    module = program.graph_module
    split_group_norms(module.graph)
    run = Sliced(module)
    with torch.no_grad():
        run.run(*flat_inputs(program, kwargs))
    assert run.sliced > len(module.graph.nodes) / 2
