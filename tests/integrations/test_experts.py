"""The auxiliary loss of mixtures of experts is that of the whole batch, padding left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.families import FAMILIES, NoFloat32, batch, build  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    assert_close,
    gradients,
    sequence_parallel,
)
from wf_backends.parallel.loss import count_valid  # noqa: E402

MIXTURES = ["mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "phimoe", "gpt_oss"]
MORE = {"router_aux_loss_coef": 0.3, "output_router_logits": True}
PADDED = (torch.arange(23)[None] < torch.tensor([[23], [9]])).long()


def given(mask: torch.Tensor | None) -> dict[str, Any]:
    found = batch()
    if mask is None:
        return found
    return found | {"attention_mask": mask, "labels": found["labels"].masked_fill(mask == 0, -100)}


def alone(name: str, words: dict[str, Any]) -> Any:
    model = build(FAMILIES[name], **MORE)
    with NoFloat32():
        output = model(**words)
    output.loss.backward()
    assert output.aux_loss > 0
    return output, gradients(model)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("mask", [None, PADDED], ids=["whole", "padded"])
@pytest.mark.parametrize("name", MIXTURES)
def test_whole_batches(name: str, mask: torch.Tensor | None, size: int) -> None:
    """As the Trainer calls a model: the same loss on every rank, gradients averaged."""
    one, wanted = alone(name, given(mask))
    models = [build(FAMILIES[name], **MORE) for _ in range(size)]

    def rank(comm: Any) -> Any:
        model = models[comm.rank]
        with wf_transformers.attach_model(model, sequence_parallel(comm)) as handle, NoFloat32():
            wf_transformers.WholeBatchHooks(model, handle)
            output = model(**given(mask))
            output.loss.backward()
        assert output.router_logits is None
        return output.loss.detach(), output.aux_loss.detach(), gradients(model)

    found = run_threads(size, rank)
    for loss, aux, _ in found:
        assert_close(loss, one.loss.detach(), "loss")
        assert_close(aux, one.aux_loss.detach(), "aux_loss")
    for key, gradient in wanted.items():
        assert_close(sum(own[key] for _, _, own in found) / size, gradient, key)


@pytest.mark.parametrize("name", MIXTURES)
def test_shares(name: str) -> None:
    """A loop of one's own: the model's loss is this rank's share of a sum."""
    words = given(PADDED)
    one, wanted = alone(name, words)
    models = [build(FAMILIES[name], **MORE) for _ in range(2)]

    def rank(comm: Any) -> Any:
        sp, model = sequence_parallel(comm), models[comm.rank]
        with wf_transformers.attach_model(model, sp), NoFloat32():
            local = sp.shard_batch(words)
            num_valid = sp.sum_over_ranks(count_valid(local["labels"]))
            kwargs = wf_transformers.forward_kwargs(model, local, num_valid=num_valid)
            output = model(**kwargs)
            output.loss.backward()
        return output.loss.detach(), gradients(model)

    found = run_threads(2, rank)
    assert_close(sum(loss for loss, _ in found), one.loss.detach(), "loss")
    for key, gradient in wanted.items():
        assert_close(sum(own[key] for _, own in found), gradient, key)


def test_which_tokens_count_must_be_known() -> None:
    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), build(FAMILIES["mixtral"], **MORE)
        with wf_transformers.attach_model(model, sp):
            local = sp.shard_batch(batch())
            with pytest.raises(ValueError, match="have an attention_mask in the batch"):
                model(**wf_transformers.forward_kwargs(model, local))

    run_threads(2, rank)


def test_verify_passes_with_that_loss() -> None:
    models = [build(FAMILIES["mixtral"], **MORE) for _ in range(2)]

    def rank(comm: Any) -> Any:
        sp, model = sequence_parallel(comm), models[comm.rank]
        return wf_transformers.verify(
            model, sp, lambda: wf_transformers.attach_model(model, sp), "strict"
        )

    assert all(report is not None for report in run_threads(2, rank))
