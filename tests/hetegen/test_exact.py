"""A split model computes the tokens, logits and outputs that it computes alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.generation.configuration_utils import CompileConfig
from transformers.pytorch_utils import Conv1D

from tests.hetegen.models import (
    CONFIGS,
    MLP,
    fast_device,
    generate,
    make_ids,
    make_model,
    max_memory,
    streamed_bytes,
)
from wf_backends.hetegen import dispatch_model
from wf_backends.hetegen.split_model import SplitWeight

NUM_TOKENS = 6


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_logits_and_state_of_a_transformer_are_exact_and_memory_is_as_planned(
    name: str, batch: int
) -> None:
    model, ids, device = make_model(name), make_ids(batch), fast_device()
    with torch.no_grad():
        expected_logits = model(ids).logits
    greedy, sampled = (generate(model, ids, NUM_TOKENS, sample) for sample in (False, True))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    memory = max_memory(model, 0.5)

    handle = dispatch_model(model, memory, device, batch=batch, prompt=9)

    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected_logits, rtol=0, atol=1e-5)
    assert torch.equal(generate(model, ids, NUM_TOKENS), greedy)
    assert torch.equal(generate(model, ids, NUM_TOKENS, sample=True), sampled)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert device.peak_bytes == handle.plan.accelerator_bytes <= memory[0]
    assert device.pinned_bytes == handle.plan.slabs * handle.plan.slab_bytes > 0
    report = handle.report()
    assert report["decode"]["passes"] > 0 and report["prefill"]["passes"] > 0
    assert all(report["lanes"][lane]["bytes"] > 0 for lane in ("link", "host", "accelerator"))
    handle.remove()
    assert (device.bytes, device.pinned_bytes) == (0, 0)
    assert torch.equal(generate(model, ids, NUM_TOKENS), greedy)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("pin_memory", [True, False, "weights"])
def test_outputs_are_exact_for_any_share_of_the_host_any_number_of_slabs_and_any_pinned_memory(
    alpha: float, prefetch: int, pin_memory: bool | str
) -> None:
    model, x = MLP(), torch.randn(2, 3, 64)
    settings = {"alpha": alpha, "prefetch": prefetch, "pin_memory": pin_memory}
    with torch.inference_mode():
        expected = model(x)
        with dispatch_model(model, {"accelerator": 30_000}, fast_device(), **settings) as handle:
            for _ in range(3):
                torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-5)
        for split in handle.plan.splits:
            assert abs(split.alpha("decode") - alpha) <= 0.5 / 64  # rounded to one of 64 rows
        assert torch.equal(model(x), expected)


def test_outputs_are_exact_if_layers_are_called_in_another_order_than_the_models() -> None:
    model, reference, x = MLP(5), MLP(5), torch.randn(1, 64)
    orders = [(0, 3, 1, 4, 2), (0, 3, 1, 4, 2), (1, 1, 2, 4, 4, 0)]
    with torch.no_grad(), dispatch_model(model, {0: 30_000}, fast_device()):
        for order in orders:
            actual, expected = x, x
            for i in order:
                actual, expected = model.layers[i](actual), reference.layers[i](expected)
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_a_product_with_the_weight_on_the_left_is_exact_and_computed_on_the_lanes() -> None:
    """Mamba computes its time steps so; host memory times a GPU's columns would be an error."""
    model, columns = MLP(2), torch.randn(3, 64, 5)
    weight = model.layers[1].weight
    with torch.no_grad():
        expected = weight @ columns
        with dispatch_model(model, {0: 20_000}, fast_device()) as handle:
            actual = weight @ columns
            lanes = handle.report()["lanes"]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    assert lanes["host"]["bytes"] + lanes["accelerator"]["bytes"] == weight.nbytes


def test_a_product_that_scales_its_bias_is_computed_in_host_memory() -> None:
    """The lanes have no `beta` and `alpha` of torch.addmm."""
    model, x, bias = nn.Sequential(Conv1D(64, 64)), torch.randn(3, 64), torch.randn(64)
    weight = model[0].weight
    with torch.no_grad():
        expected = torch.addmm(bias, x, weight, beta=2, alpha=0.5)
        with dispatch_model(model, {0: 10_000}, fast_device()):
            actual = torch.addmm(bias, x, weight, beta=2, alpha=0.5)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_a_layer_that_stands_twice_in_a_model_is_split_once() -> None:
    model, x = MLP(2), torch.randn(1, 64)
    model.layers.append(model.layers[0])
    with torch.no_grad():
        expected = model(x)
        with dispatch_model(model, {0: 10_000}, fast_device()) as handle:
            assert len(handle.plan.splits) == 2
            assert all(type(layer.weight) is SplitWeight for layer in model.layers)
            for _ in range(2):
                torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-5)


def test_bfloat16_outputs_are_exact_up_to_rounding() -> None:
    model, x = MLP().bfloat16(), torch.randn(1, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(x)
        with dispatch_model(model, {0: 16_000}, fast_device()):
            torch.testing.assert_close(model(x), expected, rtol=0, atol=2e-2)


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_of_a_transformer_are_exact_while_its_weights_are_pinned_and_afterwards(
    name: str,
) -> None:
    model, ids = make_model(name), make_ids(2)
    tokens = generate(model, ids, NUM_TOKENS)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with dispatch_model(model, max_memory(model, 0.5), fast_device(), pin_memory="weights"):
        assert torch.equal(generate(model, ids, NUM_TOKENS), tokens)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(generate(model, ids, NUM_TOKENS), tokens)


@pytest.mark.parametrize("pin_memory", [True, "weights"])
def test_a_model_made_in_inference_mode_is_exact_if_it_is_split_outside_of_it(
    pin_memory: bool | str,
) -> None:
    with torch.inference_mode():
        model, ids = make_model("llama"), make_ids(1)
        expected = model(ids).logits
    memory = max_memory(model, 0.5)
    with dispatch_model(model, memory, fast_device(), pin_memory=pin_memory):
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-5)


def compiled_everywhere() -> CompileConfig:
    """generate compiles with a static cache on CUDA; with this also on a CPU."""
    config = CompileConfig(backend="eager")
    config._compile_all_devices = True
    return config


@pytest.mark.parametrize(
    "options",
    [
        {"cache_implementation": "static", "compile_config": compiled_everywhere()},
        {"prefill_chunk_size": 4},  # with transformers 4 it compiles on a CPU, too
    ],
    ids=["static cache", "prefill in chunks"],
)
def test_generate_is_exact_where_it_would_compile_the_model_as_one_graph(
    options: dict[str, Any],
) -> None:
    """The lanes cannot be in a graph: it is not compiled while it is split."""
    model: Any = make_model("llama")
    ids = make_ids(1)
    expected = generate(model, ids, NUM_TOKENS)
    with dispatch_model(model, max_memory(model, 0.5), fast_device()):
        tokens = model.generate(
            ids, max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0, **options
        )
    assert torch.equal(tokens, expected)
    assert "get_compiled_call" not in vars(model)


class MixedDtypes(nn.Module):
    """A linear with rows of 66 bytes in bfloat16, and one in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear_bf16 = nn.Linear(33, 65, dtype=torch.bfloat16)
        self.linear_fp32 = nn.Linear(16, 40)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fp32(self.linear_bf16(x.bfloat16()).float()[..., :16])


def test_slabs_hold_rows_of_bfloat16_and_of_float32() -> None:
    model, x = MixedDtypes(), torch.ones(2, 33)
    with torch.no_grad():
        expected = model(x)
        with dispatch_model(model, {0: 2_500}, fast_device(), alpha=0.0) as handle:
            # In one buffer the second slab would start where no float32 may.
            assert handle.plan.slab_bytes % 4
            for _ in range(2):
                # A bfloat16 of the first linear may round the other way: 2**-8 of it.
                torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-2)


def test_experts_without_tokens_are_not_copied() -> None:
    model, ids = make_model("mixtral"), make_ids(1, 1)
    with (
        torch.no_grad(),
        dispatch_model(model, max_memory(model, 0.3), fast_device(), alpha=0.0) as handle,
    ):
        for _ in range(2):  # until the copies follow the order of the calls
            model(ids)
        bytes_before = handle.report()["lanes"]["link"]["bytes"]
        model(ids)
        copied = handle.report()["lanes"]["link"]["bytes"] - bytes_before
    streamed = streamed_bytes(handle.plan)
    dense = sum(nbytes for name, nbytes in streamed.items() if "experts" not in name)
    experts = sum(streamed.values()) - dense
    assert copied < dense + 0.75 * experts  # a token goes to 2 of 4 experts
