"""A split model gives what it gives alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.hetegen.models import (
    CONFIGS,
    VOCABULARY,
    Plain,
    fast_device,
    make_model,
    split_memory,
)
from wf_backends.hetegen import dispatch_model

TOKENS = 6


def ids_of(batch: int, length: int = 9) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.manual_seed(1))


def generate(model: nn.Module, ids: Tensor, sample: bool) -> Tensor:
    torch.manual_seed(3)
    return model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=TOKENS,
        do_sample=sample,
        pad_token_id=0,
    )


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_tokens_and_logits(name: str, batch: int) -> None:
    model, ids = make_model(name), ids_of(batch)
    with torch.no_grad():
        logits = model(ids).logits
    tokens = [generate(model, ids, sample) for sample in (False, True)]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    memory = split_memory(model, 0.5)
    device = fast_device()
    handle = dispatch_model(model, memory, device, batch=batch, prompt=9)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, logits, rtol=0, atol=1e-5)
    for sample, expected in zip((False, True), tokens, strict=True):
        assert torch.equal(generate(model, ids, sample), expected)
    assert {key for key in model.state_dict()} == set(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert device.peak_bytes == handle.plan.accelerator_bytes <= memory[0]
    assert device.pinned_bytes == handle.plan.slabs * handle.plan.slab_bytes > 0
    told = handle.report()
    assert told["decode"]["passes"] > 0 and told["prefill"]["passes"] > 0
    assert all(told["lanes"][lane]["bytes"] > 0 for lane in ("link", "host", "accelerator"))
    handle.remove()
    assert (device.bytes, device.pinned_bytes) == (0, 0)
    assert torch.equal(generate(model, ids, False), tokens[0])


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_any_share_of_the_host_and_any_number_of_slabs(alpha: float, prefetch: int) -> None:
    model, x = Plain(), torch.randn(2, 3, 64)
    with torch.inference_mode():
        expected = model(x)
        with dispatch_model(
            model, {"accelerator": 30_000}, fast_device(), alpha=alpha, prefetch=prefetch
        ) as handle:
            for _ in range(3):
                torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-5)
        for split in handle.plan.splits:
            assert abs(split.alpha("decode") - alpha) <= 0.5 / 64
        assert torch.equal(model(x), expected)


def test_layers_in_another_order_than_that_of_the_model() -> None:
    model, x = Plain(5), torch.randn(1, 64)
    model.layers = nn.ModuleList(model.layers[i] for i in (0, 3, 1, 4, 2))
    reordered = Plain(5)
    with torch.no_grad():
        handle = dispatch_model(reordered, {0: 30_000}, fast_device())
        for order in [(0, 3, 1, 4, 2)] * 2 + [(1, 1, 2, 4, 4, 0)]:
            y, expected = x, x
            for i in order:
                y, expected = reordered.layers[i](y), Plain(5).layers[i](expected)
            torch.testing.assert_close(y, expected, rtol=0, atol=1e-5)
        handle.remove()


def test_bfloat16() -> None:
    model, x = Plain().bfloat16(), torch.randn(1, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(x)
        with dispatch_model(model, {0: 16_000}, fast_device()):
            torch.testing.assert_close(model(x), expected, rtol=0, atol=2e-2)


def test_experts_without_tokens_are_not_copied() -> None:
    model = make_model("mixtral")
    memory = split_memory(model, 0.3)
    handle = dispatch_model(model, memory, fast_device(), alpha=0.0)
    ids = ids_of(1, 1)
    with torch.no_grad():
        model(ids), model(ids)
        before = handle.report()["lanes"]["link"]["bytes"]
        model(ids)
    copied = handle.report()["lanes"]["link"]["bytes"] - before
    streamed = {s.linear.name: s.streamed_decode * s.linear.row_bytes for s in handle.plan.splits}
    dense = sum(size for name, size in streamed.items() if "experts" not in name)
    experts = sum(streamed.values()) - dense
    assert copied < dense + 0.75 * experts  # 2 of 4 experts
    handle.remove()
