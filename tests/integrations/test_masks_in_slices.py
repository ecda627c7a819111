"""A model under a mask in slices gives on ranks what it gives on one device under a dense mask."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

import transformers as tf  # noqa: E402

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.families import (  # noqa: E402
    FAMILIES,
    LLAMA,
    SEQLEN,
    Family,
    NoFloat32,
    assert_close,
    batch,
    build,
    gradients,
)
from tests.integrations.transformers_models import sequence_parallel  # noqa: E402
from tests.slices import prefix_lm, sees, shared_question  # noqa: E402
from wf_backends.parallel import count_valid, prepare_batch, token_loss  # noqa: E402
from wf_transformers import WholeBatchHooks  # noqa: E402

Words = dict[str, Any]
MASKS = {
    "prefix_lm": prefix_lm(7, SEQLEN),
    "shared_question": shared_question(5, (9, 14, SEQLEN)),
}
MODELS = {"llama": Family("LlamaForCausalLM", "LlamaConfig", LLAMA)} | {
    name: FAMILIES[name] for name in ("stablelm", "gptj", "bert", "gemma2")
}


def dense(slices: Words, family: Family) -> Tensor:
    """As the model takes it: (b, 1, S, S), 0 where a key is seen; BERT (b, S, S), 1 there, or in
    transformers 5 (b, 1, S, S), True there."""
    pairs = [[sees(slices, query, key) for key in range(SEQLEN)] for query in range(SEQLEN)]
    seen = torch.tensor(pairs).expand(2, -1, -1)
    if family.masked:
        return seen.long() if tf.__version__ < "5" else seen[:, None]
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -1e30)[:, None]


def alone(
    name: str, given: Words, mask: Tensor, mode: Any = nullcontext
) -> tuple[Tensor, Tensor, Any]:
    family = MODELS[name]
    model = build(family)
    whole = prepare_batch(given, multiple=1, labels_are_shifted=family.masked)
    with mode():
        logits = model(given["input_ids"], attention_mask=mask).logits
    loss = token_loss(logits, whole["labels"], count_valid(whole["labels"]))
    loss.backward()
    return logits.detach(), loss.detach(), gradients(model)


CUTS = [
    (name, size, layout, False)
    for name in ("llama", "stablelm", "gptj", "bert")
    for size, layout in ((2, "zigzag"), (4, "balanced"))
]
RECOMPUTED = [(name, 2, "zigzag", True) for name in ("llama", "stablelm", "bert")]


@pytest.mark.parametrize(("name", "size", "layout", "recompute"), CUTS + RECOMPUTED)
@pytest.mark.parametrize("mask", MASKS)
def test_batches_that_are_cut(
    name: str, size: int, layout: str, recompute: bool, mask: str
) -> None:
    given, slices, family = batch(), MASKS[mask], MODELS[name]
    mode: Any = nullcontext if recompute else NoFloat32  # of which the backward knows nothing
    logits, loss, wanted = alone(name, given, dense(slices, family), mode)
    models = [build(family) for _ in range(size)]

    def rank(comm: Any) -> tuple[Tensor, Tensor, Any]:
        sp, model = sequence_parallel(comm, layout=layout), models[comm.rank]
        with wf_transformers.attach(model, sp, verify=False) as handle, mode():
            if recompute:
                model.gradient_checkpointing_enable(handle.checkpoint_kwargs)
            local = sp.shard_batch(given | slices, labels_are_shifted=family.masked)
            found = model(**wf_transformers.forward_kwargs(model, local)).logits
            share = sp.loss(found, local["labels"])
            share.backward()
            full = sp.unshard(found.detach(), dim=1, **slices)
        return full, share.detach(), gradients(model)

    found = run_threads(size, rank)
    for full, _, _ in found:
        assert_close(full[:, :SEQLEN], logits, "logits")
    assert_close(sum(share for _, share, _ in found), loss, "loss")
    for parameter, gradient in wanted.items():
        assert_close(sum(own[parameter] for _, _, own in found), gradient, parameter)


@pytest.mark.parametrize("layout", ["zigzag", "balanced"])
@pytest.mark.parametrize("told", ["slices", "dense"])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_whole_batches(name: str, told: str, layout: str) -> None:
    """As a collator makes them: slices, or a dense mask, which is read into slices."""
    given, slices = batch(), MASKS["prefix_lm"]
    logits, loss, wanted = alone(name, given, dense(slices, MODELS[name]))
    mask = slices if told == "slices" else {"attention_mask": dense(slices, MODELS[name])}
    models = [build(MODELS[name]) for _ in range(2)]

    def rank(comm: Any) -> tuple[Tensor, Tensor, Any]:
        sp, model = sequence_parallel(comm, layout=layout), models[comm.rank]
        WholeBatchHooks(model, wf_transformers.attach(model, sp, verify=False), whole_logits=True)
        output = model(**given, **mask)
        output.loss.backward()
        return output.logits.detach(), output.loss.detach(), gradients(model)

    found = run_threads(2, rank)
    for full, share, _ in found:
        assert_close(full, logits, "logits")
        assert_close(share, loss, "loss")
    for parameter, gradient in wanted.items():
        assert_close(sum(own[parameter] for _, _, own in found) / 2, gradient, parameter)


def test_a_models_own_mask_needs_no_slices() -> None:
    causal = torch.zeros(SEQLEN, SEQLEN, dtype=torch.float64).masked_fill(
        torch.ones(SEQLEN, SEQLEN).triu(1) != 0, -1e30
    )
    given = {"attention_mask": causal[None, None], "input_ids": batch()["input_ids"]}
    from wf_transformers.whole_batches.arguments import with_slices

    assert "q_ranges" not in with_slices(given, "causal")
    assert with_slices(given, "masked")["attn_mask_types"] == ["causal"]


def refused(name: str, error: type[Exception], message: str, **more: Any) -> None:
    models = [build(MODELS[name], **more) for _ in range(2)]

    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), models[comm.rank]
        with wf_transformers.attach(model, sp, verify=False):
            local = sp.shard_batch(batch() | MASKS["prefix_lm"])
            with pytest.raises(error, match=message):
                model(**wf_transformers.forward_kwargs(model, local))

    run_threads(2, rank)


def test_a_layout_by_slices_is_not_compared_before(caplog: pytest.LogCaptureFixture) -> None:
    """What a model does with slices is known with its first batch alone."""
    models = [build(MODELS["llama"]) for _ in range(2)]

    def rank(comm: Any) -> None:
        sp = sequence_parallel(comm, layout="balanced")
        with wf_transformers.attach(models[comm.rank], sp):
            local = sp.shard_batch(batch() | MASKS["prefix_lm"])
            models[comm.rank](**wf_transformers.forward_kwargs(models[comm.rank], local))

    run_threads(2, rank)
    assert "the balanced layout follows from the slices of a mask" in caplog.text


def test_windows_are_refused_beside_them() -> None:
    refused("gemma2", NotImplementedError, "has a sliding window .* take a model without windows")
