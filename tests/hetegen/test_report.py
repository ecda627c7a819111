"""What `handle.report()` counts: passes of a model, and what the lanes did for it alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from tests.hetegen.models import VOCABULARY, Plain, fast_device
from wf_backends.hetegen import dispatch_model
from wf_backends.hetegen.runner import PASSES_KEPT

SPLIT = {0: 30_000}


def t5() -> nn.Module:
    config = T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        decoder_start_token_id=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config).eval()


def test_the_lanes_compute_all_rows_of_a_pass_and_no_other() -> None:
    model, x = Plain(), torch.randn(1, 64)
    with torch.no_grad(), dispatch_model(model, SPLIT, fast_device()) as handle:
        for _ in range(5):
            model(x)
        told = handle.report()
    rows = sum(split.linear.nbytes for split in handle.plan.splits)
    lanes = told["lanes"]
    assert lanes["host"]["bytes"] + lanes["accelerator"]["bytes"] == 5 * rows
    assert told["decode"]["passes"] == 5 and told["prefill"]["passes"] == 0


def test_a_step_of_a_decoder_is_a_pass_where_an_encoder_ran_before_it() -> None:
    """The encoder's first linear is the first of all, and no later step calls it."""
    model, ids = t5(), torch.arange(3, 12)[None]
    nbytes = sum(p.nbytes for p in model.parameters())
    with dispatch_model(model, {0: nbytes // 2}, fast_device(), prompt=9) as handle:
        for passes in (1, 2):
            model.generate(ids, max_new_tokens=6)  # type: ignore[operator]
            told = handle.report()
            assert told["prefill"]["passes"] == passes  # the encoder's
            assert told["decode"]["passes"] == 6 * passes


def test_a_pass_is_a_call_from_outside_also_after_one_that_failed() -> None:
    model, x = Plain(), torch.randn(1, 64)

    def fail(*_: object) -> None:
        raise OSError("no")

    with torch.no_grad(), dispatch_model(model, SPLIT, fast_device()) as handle:
        model(x)
        hook = model.register_forward_pre_hook(fail, prepend=True)
        for _ in range(2):
            try:
                model(x)
            except OSError:
                hook.remove()
        model(x)
        assert handle.report()["decode"]["passes"] == 3


def test_passes_are_told_apart_after_ctrl_c() -> None:
    """torch tells no hook that it ended a call; the next call of the same model is a new one."""
    model, ids = t5(), torch.arange(3, 12)[None]
    nbytes = sum(p.nbytes for p in model.parameters())

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with dispatch_model(model, {0: nbytes // 2}, fast_device(), prompt=9) as handle:
        hook = model.decoder.block[1].register_forward_hook(interrupt)  # type: ignore[union-attr, index]
        with pytest.raises(KeyboardInterrupt):
            model.generate(ids, max_new_tokens=6)  # type: ignore[operator]
        hook.remove()
        model.generate(ids, max_new_tokens=1)  # type: ignore[operator]
        before = handle.report()
        model.generate(ids, max_new_tokens=6)  # type: ignore[operator]
        told = handle.report()
    assert told["prefill"]["passes"] - before["prefill"]["passes"] == 1  # the encoder's
    assert told["decode"]["passes"] - before["decode"]["passes"] == 6


def test_passes_that_are_not_kept_are_counted() -> None:
    model, x = nn.Sequential(nn.Linear(64, 16), nn.Linear(16, 16)), torch.randn(1, 64)
    with torch.no_grad(), dispatch_model(model, {0: 3_000}, fast_device()) as handle:
        for _ in range(PASSES_KEPT + 9):
            model(x)
        told = handle.report()
    assert told["decode"]["passes"] == PASSES_KEPT + 9
    lane = told["lanes"]["accelerator"]
    assert lane["idle_seconds"] > lane["busy_seconds"]  # of all the time, not of the last passes


def test_a_device_that_is_used_again_counts_anew() -> None:
    model, x, device = Plain(), torch.randn(1, 64), fast_device()
    reports = []
    for _ in range(2):
        with torch.no_grad(), dispatch_model(model, SPLIT, device) as handle:
            for _ in range(3):
                model(x)
        reports.append((handle, handle.report()["lanes"]))
    counts = [{name: lane["bytes"] for name, lane in lanes.items()} for _, lanes in reports]
    assert counts[0]["host"] == counts[1]["host"] > 0
    assert counts[0]["accelerator"] == counts[1]["accelerator"] > 0
    for handle, lanes in reports:  # also of the first, which was removed
        assert handle.report()["lanes"] == lanes
