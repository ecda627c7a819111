"""Masks, documents and positions of whole batches: which are cut, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)


from tests.helpers import run_threads  # noqa: E402
from tests.integrations.deepspeed_jobs import tiny_llama  # noqa: E402
from tests.integrations.mean_gradients import assert_mean_gradients  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    batch,
    build,
    gradients,
    one_rank,  # noqa: E402
    sequence_parallel,
)
from wf_transformers import WholeBatchHooks, attach  # noqa: E402

PREFIX_MASK = torch.ones(1, 1, 8, 8).tril()  # causal, but the first four tokens see each other
PREFIX_MASK[..., :4, :4] = 1


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (PREFIX_MASK, "attention_mask must be bool, or 0 where a key is seen"),
        (PREFIX_MASK[:, 0], r"attention_mask must be a tensor \(1, 8\)"),
        ({"full_attention": PREFIX_MASK}, r"attention_mask must be a tensor \(1, 8\)"),
    ],
    ids=["0 and 1", "three dimensions", "dict"],
)
def test_a_mask_of_unknown_form_is_refused(mask: Any, message: str) -> None:
    """Otherwise a causal mask would silently take its place. A refused call leaves no hooks."""
    model = tiny_llama()
    with attach(model, one_rank()) as handle:
        WholeBatchHooks(model, handle)
        with pytest.raises(ValueError, match=message):
            model(torch.ones(1, 8, dtype=torch.int64), attention_mask=mask)
    assert not model._forward_pre_hooks and not model._forward_hooks


NUMBERS = torch.tensor([[1] * 9 + [2] * 10 + [0] * 4])
"""The document of every token, as axolotl and LLaMA-Factory pack samples; 0: padding."""


def packed() -> dict[str, Any]:
    labelled = batch(seqlen=23)
    labelled["labels"][:, [0, 9, *range(19, 23)]] = -100  # no document predicts the next one
    positions = torch.cat([torch.arange(length) for length in (9, 10, 4)])
    return labelled | {"position_ids": positions[None]}


def test_an_attention_mask_that_numbers_documents_separates_them() -> None:
    seen = (NUMBERS.mT == NUMBERS).tril()
    reference, dense = build("llama", "sdpa", {}), torch.zeros(1, 1, 23, 23, dtype=torch.float64)
    expected = reference(**packed(), attention_mask=dense.masked_fill(~seen, -1e9)).loss
    expected.backward()

    def rank(comm: Any) -> tuple[float, dict[str, torch.Tensor]]:
        model = build("llama", "sdpa", {})
        WholeBatchHooks(model, attach(model, sequence_parallel(comm)))
        loss = model(**packed(), attention_mask=NUMBERS).loss
        loss.backward()
        return loss.item(), gradients(model)

    results = run_threads(2, rank)
    for loss, _ in results:
        assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert_mean_gradients([grads for _, grads in results], gradients(reference))


@pytest.mark.parametrize(
    "mask",
    [NUMBERS.flip(1), torch.cat([NUMBERS, NUMBERS.clamp(max=1)])],
    ids=["falling", "two samples"],
)
def test_an_attention_mask_that_numbers_no_common_documents_is_refused(mask: torch.Tensor) -> None:
    model = tiny_llama()
    with attach(model, one_rank()) as handle:
        WholeBatchHooks(model, handle)
        with pytest.raises(ValueError, match="attention_mask numbers documents, but not the same"):
            model(torch.ones_like(mask), attention_mask=mask)


def test_position_ids_that_cannot_be_cut_are_refused() -> None:
    """These are not (b, S); the hooks would silently overwrite them."""
    model = build("gpt2", "eager", {})
    with attach(model, one_rank()) as handle:
        WholeBatchHooks(model, handle)
        with pytest.raises(ValueError, match="position_ids.* would be overwritten"):
            model(torch.ones(1, 8, dtype=torch.int64), position_ids=torch.arange(8) + 5)
