"""`handle.report()` counts the passes of a model, and the bytes and seconds of its lanes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from tests.hetegen.models import MLP, MLP_SPLIT, VOCABULARY, fast_device, max_memory
from wf_backends.hetegen import dispatch_model
from wf_backends.hetegen.runner import PASSES_KEPT


@pytest.fixture
def t5() -> nn.Module:
    config = T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        decoder_start_token_id=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config).eval()


@pytest.fixture
def ids() -> Tensor:
    """A prompt of 9 tokens."""
    return torch.arange(3, 12)[None]


def test_host_and_accelerator_compute_each_row_once_in_every_pass() -> None:
    model, x = MLP(), torch.randn(1, 64)
    with torch.no_grad(), dispatch_model(model, MLP_SPLIT, fast_device()) as handle:
        for _ in range(5):
            model(x)
        report = handle.report()
    lanes = report["lanes"]
    split_bytes = sum(split.linear.nbytes for split in handle.plan.splits)
    assert lanes["host"]["bytes"] + lanes["accelerator"]["bytes"] == 5 * split_bytes
    assert report["decode"]["passes"] == 5 and report["prefill"]["passes"] == 0


def test_an_encoder_is_a_prefill_pass_and_every_step_of_its_decoder_a_decode_pass(
    t5: nn.Module, ids: Tensor
) -> None:
    """A pass cannot begin at the model's first linear: that is the encoder's, which runs once."""
    with dispatch_model(t5, max_memory(t5, 0.5), fast_device(), prompt=9) as handle:
        for num_generated in (1, 2):
            t5.generate(ids, max_new_tokens=6)  # type: ignore[operator]
            report = handle.report()
            assert report["prefill"]["passes"] == num_generated
            assert report["decode"]["passes"] == 6 * num_generated


def test_a_model_that_calls_its_first_linear_again_and_again_is_one_pass() -> None:
    """As Albert, whose layers are one module."""
    layer, x = nn.Linear(64, 64), torch.randn(1, 64)
    model = nn.Sequential(layer, layer, nn.Linear(64, 64), layer)
    with torch.no_grad(), dispatch_model(model, {0: 20_000}, fast_device()) as handle:
        for passes in (1, 2):
            model(x)
            assert handle.report()["decode"]["passes"] == passes
        for passes in (3, 4):  # no module's call tells where these begin
            layer(x)
            assert handle.report()["decode"]["passes"] == passes


def test_a_call_that_fails_before_its_first_linear_is_no_pass() -> None:
    model, x = MLP(), torch.randn(1, 64)

    def fail(*_: object) -> None:
        raise OSError("hook failed")

    with torch.no_grad(), dispatch_model(model, MLP_SPLIT, fast_device()) as handle:
        model(x)
        hook = model.register_forward_pre_hook(fail, prepend=True)
        with pytest.raises(OSError, match="hook failed"):
            model(x)
        hook.remove()
        model(x)
        model(x)
        assert handle.report()["decode"]["passes"] == 3


def test_passes_are_counted_correctly_after_ctrl_c(t5: nn.Module, ids: Tensor) -> None:
    """torch runs no hook at the end of a call that Ctrl-C ended: the next call begins a pass."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with dispatch_model(t5, max_memory(t5, 0.5), fast_device(), prompt=9) as handle:
        hook = t5.decoder.block[1].register_forward_hook(interrupt)  # type: ignore[union-attr, index]
        with pytest.raises(KeyboardInterrupt):
            t5.generate(ids, max_new_tokens=6)  # type: ignore[operator]
        hook.remove()
        t5.generate(ids, max_new_tokens=1)  # type: ignore[operator]
        before = handle.report()
        t5.generate(ids, max_new_tokens=6)  # type: ignore[operator]
        after = handle.report()
    assert after["prefill"]["passes"] - before["prefill"]["passes"] == 1
    assert after["decode"]["passes"] - before["decode"]["passes"] == 6


def test_counts_and_idle_seconds_are_those_of_all_passes_not_only_of_the_kept_ones() -> None:
    model, x = nn.Sequential(nn.Linear(64, 16), nn.Linear(16, 16)), torch.randn(1, 64)
    with torch.no_grad(), dispatch_model(model, {0: 3_000}, fast_device()) as handle:
        for _ in range(PASSES_KEPT + 9):
            model(x)
        report = handle.report()
    assert report["decode"]["passes"] == PASSES_KEPT + 9
    lane = report["lanes"]["accelerator"]
    assert lane["idle_seconds"] > lane["busy_seconds"]


def test_a_device_that_is_used_again_starts_its_counts_at_zero() -> None:
    model, x, device = MLP(), torch.randn(1, 64), fast_device()
    handles, lanes = [], []
    for _ in range(2):
        with torch.no_grad(), dispatch_model(model, MLP_SPLIT, device) as handle:
            for _ in range(3):
                model(x)
        handles.append(handle)
        lanes.append(handle.report()["lanes"])
    for name in ("host", "accelerator"):
        assert lanes[0][name]["bytes"] == lanes[1][name]["bytes"] > 0
    assert [handle.report()["lanes"] for handle in handles] == lanes  # also of the first handle
