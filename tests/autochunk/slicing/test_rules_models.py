"""The rules on graphs of real models: every slice of every node equals the rows of its output.

Models run in float64; the reference of a node is its output in the model's own run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves, tree_map

from tests.autochunk.slicing.slicing import assert_slices, tensors
from wf_backends.autochunk.slicing.group_norm import split_group_norms
from wf_backends.autochunk.slicing.rules import sources

TOKENS: dict[str, Any] = {"input_ids": torch.arange(12).reshape(2, 6), "use_cache": False}
SIZES = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 12}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """As the default dtype: GPT-2 makes its mask without naming a dtype."""
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default_dtype)


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
    """A UNet's block: group norm, SiLU, convolution, then down- and upsampling."""

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


class SliceChecker(fx.Interpreter):
    """Runs a graph, and checks slices of each node along every dimension that has a rule."""

    num_sliced_dims: int = 0

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        inputs = {source: copied(self.env[source]) for source in n.all_input_nodes}
        output = super().run_node(n)  # may write into its inputs
        shape = getattr(tensors(output)[0] if output is not None else None, "shape", ())
        assert sources(n, len(shape)) is None
        for dim in range(len(shape)):
            if sources(n, dim) is not None:
                assert_slices(n, dim, output, lambda source: copied(inputs[source]), seed=dim)
                self.num_sliced_dims += 1
        return output


def copied(value: Any) -> Any:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value)


def flat_inputs(program: ExportedProgram, kwargs: dict[str, Any]) -> list[Any]:
    """The values of the graph's placeholders: parameters, buffers, constants, arguments."""
    state = {**program.state_dict, **program.constants}
    arguments = iter(tree_leaves(kwargs))
    specs = program.graph_signature.input_specs
    return [state[s.target] if s.target is not None else next(arguments) for s in specs]


@pytest.mark.parametrize(
    ("build", "attention"),
    [*product((gpt2, llama, vit), ("eager", "sdpa")), (resnet_block, "none")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_every_slice_of_every_node_is_exact(
    build: Callable[[str], tuple[nn.Module, dict[str, Any]]], attention: str
) -> None:
    torch.manual_seed(0)
    model, kwargs = build(attention)
    program = torch.export.export(model.eval(), (), kwargs, strict=False)
    module = program.graph_module
    split_group_norms(module.graph)
    checker = SliceChecker(module)
    with torch.no_grad():
        checker.run(*flat_inputs(program, kwargs))
    assert checker.num_sliced_dims > len(module.graph.nodes) / 2
