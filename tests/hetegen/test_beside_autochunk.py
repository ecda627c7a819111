"""AutoChunk beside HeteGen: activations in slices, weights split."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.hetegen.models import fast_device, make_model, split_memory
from wf_backends.autochunk import autochunk
from wf_backends.graph import StorageTracker
from wf_backends.hetegen import Handle, ShapedDevice, dispatch_model

ANY = 100.0  # slowdown: these models are small, and memory is the matter here
IDS = torch.randint(3, 96, (1, 48), generator=torch.manual_seed(1))
FORM = {"input_ids": IDS, "use_cache": False}


def chunked(model: nn.Module) -> nn.Module:
    return autochunk(model, (), FORM, max_memory=90_000, max_slowdown=ANY)


def split(model: nn.Module, device: ShapedDevice) -> Handle:
    return dispatch_model(model, split_memory(model, 0.5), device)


@pytest.mark.parametrize("name", ["gpt2", "llama-tied"])
def test_the_same_tokens_within_both_budgets(name: str) -> None:
    model, device = make_model(name, "eager"), fast_device()
    words = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 5, "pad_token_id": 0}
    tokens = model.generate(IDS, **words)  # type: ignore[operator]
    with torch.no_grad():
        logits = model(**FORM).logits
    handle = split(model, device)
    ours = chunked(model)
    assert ours.plan.regions and ours.plan.peak <= 90_000 < ours.plan.peak_before  # type: ignore[union-attr]
    runner = handle._runner
    assert runner is not None
    split_memories = (*runner._slabs, *runner._pinned, *runner._resident)
    known = (*model.parameters(), *model.buffers(), IDS, *split_memories)
    with torch.no_grad(), StorageTracker(known) as seen:
        found = ours(**FORM).logits
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-5)
    assert seen.peak <= 1.05 * ours.plan.peak  # type: ignore[union-attr]
    lanes = handle.report()["lanes"]
    assert all(lane["bytes"] > 0 for lane in lanes.values())
    split_bytes = sum(each.linear.nbytes for each in handle.plan.splits)
    assert lanes["host"]["bytes"] + lanes["accelerator"]["bytes"] >= split_bytes
    assert torch.equal(ours.generate(IDS, **words), tokens)  # type: ignore[operator]
    assert device.peak_bytes == handle.plan.accelerator_bytes <= split_memory(model, 0.5)[0]
    handle.remove()
    assert torch.equal(ours.generate(IDS, **words), tokens)  # type: ignore[operator]


def test_a_model_that_is_split_after_its_chunks_were_planned_is_planned_anew() -> None:
    """A slice of a split weight would be computed where it lies, in host memory, by nobody's plan:
    it is refused, and no region has one."""
    model = nn.Sequential(nn.Linear(64, 4096), nn.GELU(), nn.Linear(4096, 64)).eval()
    x, memory = torch.randn(1, 64), {0: 400_000}
    plain = autochunk(model, (x,), max_slowdown=ANY)
    with torch.no_grad():
        expected = model(x)
        with dispatch_model(model, memory, fast_device()):
            with pytest.raises(NotImplementedError, match="call dispatch_model before autochunk"):
                model[0].weight.narrow(0, 0, 8)
            for ours in (plain, autochunk(model, (x,), max_slowdown=ANY)):
                torch.testing.assert_close(ours(x), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(plain(x), expected, rtol=0, atol=1e-5)


def test_the_parameter_says_where_its_products_are() -> None:
    model = make_model("llama-tied")
    with split(model, fast_device()):
        weight = model.get_input_embeddings().weight  # type: ignore[operator]
        weight.compute_device = torch.device("meta")
        assert weight.device == torch.device("meta")
        assert isinstance(weight, nn.Parameter)
    assert type(weight) is nn.Parameter and weight.device == torch.device("cpu")
