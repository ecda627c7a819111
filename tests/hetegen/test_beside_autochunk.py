"""AutoChunk and HeteGen on one model: activations in slices, weights split over two devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.hetegen.models import fast_device, generate, make_model, max_memory
from wf_backends.autochunk import autochunk
from wf_backends.autochunk.graph import StorageTracker
from wf_backends.hetegen import Handle, ShapedDevice, dispatch_model

ANY_SLOWDOWN = 100.0  # these models are small; the tests are about memory
ACTIVATION_BYTES = 90_000  # less than the peak of the models without AutoChunk
IDS = torch.randint(3, 96, (1, 48), generator=torch.manual_seed(1))
KWARGS = {"input_ids": IDS, "use_cache": False}


def chunk(model: nn.Module) -> Any:
    return autochunk(model, (), KWARGS, max_memory=ACTIVATION_BYTES, max_slowdown=ANY_SLOWDOWN)


def split(model: nn.Module, device: ShapedDevice) -> Handle:
    return dispatch_model(model, max_memory(model, 0.5), device)


@pytest.mark.parametrize("name", ["gpt2", "llama-tied"])
def test_outputs_are_exact_and_both_memory_budgets_are_kept(name: str) -> None:
    model, device = make_model(name, "eager"), fast_device()
    expected_tokens = generate(model, IDS, 5)
    with torch.no_grad():
        expected_logits = model(**KWARGS).logits

    handle = split(model, device)
    chunked = chunk(model)
    plan = chunked.plan
    assert plan.regions and plan.peak <= ACTIVATION_BYTES < plan.peak_before
    runner = handle._runner
    assert runner is not None
    split_memory = (*runner._slabs, *runner._pinned, *runner._resident)
    not_activations = (*model.parameters(), *model.buffers(), IDS, *split_memory)
    with torch.no_grad(), StorageTracker(not_activations) as tracker:
        logits = chunked(**KWARGS).logits

    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-5)
    assert tracker.peak <= 1.05 * plan.peak
    lanes = handle.report()["lanes"]
    assert all(lane["bytes"] > 0 for lane in lanes.values())
    split_bytes = sum(split.linear.nbytes for split in handle.plan.splits)
    assert lanes["host"]["bytes"] + lanes["accelerator"]["bytes"] >= split_bytes
    assert torch.equal(generate(chunked, IDS, 5), expected_tokens)
    assert device.peak_bytes == handle.plan.accelerator_bytes <= max_memory(model, 0.5)[0]
    handle.remove()
    assert torch.equal(generate(chunked, IDS, 5), expected_tokens)


def test_a_chunked_model_that_is_split_later_is_planned_again_without_slices_of_weights() -> None:
    """The host would compute a slice of a split weight, outside HeteGen's plan: it is refused."""
    model = nn.Sequential(nn.Linear(64, 4096), nn.GELU(), nn.Linear(4096, 64)).eval()
    x = torch.randn(1, 64)
    chunked_before = autochunk(model, (x,), max_slowdown=ANY_SLOWDOWN)
    with torch.no_grad():
        expected = model(x)
        with dispatch_model(model, {0: 400_000}, fast_device()):
            with pytest.raises(NotImplementedError, match="call dispatch_model before autochunk"):
                model[0].weight.narrow(0, 0, 8)
            chunked_after = autochunk(model, (x,), max_slowdown=ANY_SLOWDOWN)
            for chunked in (chunked_before, chunked_after):
                torch.testing.assert_close(chunked(x), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(chunked_before(x), expected, rtol=0, atol=1e-5)


def test_a_split_parameters_device_is_that_of_its_products() -> None:
    model = make_model("llama-tied")
    with split(model, fast_device()):
        weight = model.get_input_embeddings().weight  # type: ignore[operator]
        weight.compute_device = torch.device("meta")
        assert weight.device == torch.device("meta")
        assert isinstance(weight, nn.Parameter)
    assert type(weight) is nn.Parameter and weight.device == torch.device("cpu")
