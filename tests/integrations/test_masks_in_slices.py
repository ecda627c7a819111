"""A model under a mask in slices is exact on ranks.

The reference is the same model on one device under the dense mask of the slices, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
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
    batch,
    build,
)
from tests.integrations.results import (  # noqa: E402
    Result,
    assert_means_are,
    assert_shares_sum_to,
    run_on_shard,
    run_whole_batch,
    with_token_loss,
)
from tests.integrations.transformers_models import sequence_parallel  # noqa: E402
from tests.slices import prefix_lm, sees, shared_question  # noqa: E402
from wf_transformers import WholeBatchHooks  # noqa: E402
from wf_transformers.whole_batches.arguments import with_slices  # noqa: E402

MASKS = {
    "prefix_lm": prefix_lm(7, SEQLEN),
    "shared_question": shared_question(5, (9, 14, SEQLEN)),
}
MODELS = {"llama": Family("LlamaForCausalLM", "LlamaConfig", LLAMA)} | {
    name: FAMILIES[name] for name in ("stablelm", "gptj", "bert", "gemma2")
}


def dense_mask(slices: dict[str, Any], family: Family) -> Tensor:
    """The slices as the family takes a mask.

    Causal models: (b, 1, S, S), 0 where a key is seen. BERT: (b, S, S), 1 where a key is seen; in
    transformers 5 (b, 1, S, S), True there.
    """
    pairs = [[sees(slices, query, key) for key in range(SEQLEN)] for query in range(SEQLEN)]
    seen = torch.tensor(pairs).expand(2, -1, -1)
    if family.masked_lm:
        return seen.long() if tf.__version__ < "5" else seen[:, None]
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -1e30)[:, None]


def run_under_dense_mask(
    family: Family,
    slices: dict[str, Any],
    float64: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Result:
    model, inputs = build(family), batch()
    with float64():
        logits = model(inputs["input_ids"], attention_mask=dense_mask(slices, family)).logits
    return with_token_loss(model, logits, inputs, family.masked_lm)


SETUPS = [
    (name, size, layout, False)
    for name in ("llama", "stablelm", "gptj", "bert")
    for size, layout in ((2, "zigzag"), (4, "balanced"))
]
RECOMPUTED = [(name, 2, "zigzag", True) for name in ("llama", "stablelm", "bert")]


@pytest.mark.parametrize(("name", "size", "layout", "recompute"), SETUPS + RECOMPUTED)
@pytest.mark.parametrize("mask", MASKS)
def test_sharded_batches_are_exact(
    name: str, size: int, layout: str, recompute: bool, mask: str
) -> None:
    slices, family = MASKS[mask], MODELS[name]
    # NoFloat32 does not act in a backward: a recomputed forward would differ from the first
    float64: Any = nullcontext if recompute else NoFloat32
    expected = run_under_dense_mask(family, slices, float64)
    models = [build(family) for _ in range(size)]

    def rank(comm: Any) -> Result:
        sp, model = sequence_parallel(comm, layout), models[comm.rank]
        with wf_transformers.attach(model, sp, verify=False), float64():
            if recompute:
                model.gradient_checkpointing_enable()
            local = sp.shard_batch(batch() | slices, labels_are_shifted=family.masked_lm)
            return run_on_shard(model, sp, local, **slices)

    assert_shares_sum_to(expected, run_threads(size, rank))


@pytest.mark.parametrize("layout", ["zigzag", "balanced"])
@pytest.mark.parametrize("given_as", ["slices", "dense"])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_whole_batches_are_exact(name: str, given_as: str, layout: str) -> None:
    """As collators make them: with slices, or with a dense mask, which is read into slices."""
    slices, family = MASKS["prefix_lm"], MODELS[name]
    dense = {"attention_mask": dense_mask(slices, family)}
    inputs = batch() | (slices if given_as == "slices" else dense)
    models = [build(family) for _ in range(2)]

    def rank(comm: Any) -> Result:
        sp, model = sequence_parallel(comm, layout), models[comm.rank]
        WholeBatchHooks(model, wf_transformers.attach(model, sp, verify=False), whole_logits=True)
        return run_whole_batch(model, inputs)

    assert_means_are(run_under_dense_mask(family, slices), run_threads(2, rank))


@pytest.mark.parametrize(
    ("head", "is_causal", "window", "mask_types"),
    [
        ("causal", True, None, None),
        ("causal", True, SEQLEN, None),
        ("causal", True, 5, ["causal"]),
        ("causal", False, None, ["causal"]),
        ("masked", False, None, ["causal"]),
    ],
)
def test_a_dense_causal_mask_is_slices_only_where_it_is_not_the_models_own(
    head: Any, is_causal: bool, window: int | None, mask_types: list[str] | None
) -> None:
    """Beside a window shorter than the sequence transformers takes it as it is: all keys before.
    A causal head may be that of an encoder (RobertaForCausalLM without is_decoder)."""
    above_diagonal = torch.ones(SEQLEN, SEQLEN).triu(1) != 0
    causal = torch.zeros(SEQLEN, SEQLEN, dtype=torch.float64).masked_fill(above_diagonal, -1e30)
    inputs = {"attention_mask": causal[None, None], "input_ids": batch()["input_ids"]}
    model: Any = torch.nn.Module()
    model.is_causal = is_causal
    model.config = SimpleNamespace(sliding_window=window)
    assert with_slices(model, inputs, head).get("attn_mask_types") == mask_types


def test_windows_beside_slices_are_refused() -> None:
    models = [build(MODELS["gemma2"]) for _ in range(2)]
    message = "has a sliding window .* take a model without windows"

    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), models[comm.rank]
        with wf_transformers.attach(model, sp, verify=False):
            local = sp.shard_batch(batch() | MASKS["prefix_lm"])
            with pytest.raises(NotImplementedError, match=message):
                model(**wf_transformers.forward_kwargs(model, local))

    run_threads(2, rank)


def test_attach_does_not_verify_a_layout_that_follows_from_slices(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The slices come with the first batch."""
    models = [build(MODELS["llama"]) for _ in range(2)]

    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm, "balanced"), models[comm.rank]
        with wf_transformers.attach(model, sp):
            local = sp.shard_batch(batch() | MASKS["prefix_lm"])
            model(**wf_transformers.forward_kwargs(model, local))

    run_threads(2, rank)
    assert "the balanced layout follows from the slices of a mask" in caplog.text
