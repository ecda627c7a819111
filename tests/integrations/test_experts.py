"""The auxiliary loss of a mixture's routers: on ranks it is that of the whole batch on one device.

The reference is transformers' own model with all tokens, in float64. Padding does not count.
"""

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
ROUTER_LOSS = {"router_aux_loss_coef": 0.3, "output_router_logits": True}
PADDING_MASK = (torch.arange(23)[None] < torch.tensor([[23], [9]])).long()  # the 2nd sequence: 9


def build_mixture(name: str) -> Any:
    """The same weights at every call."""
    return build(FAMILIES[name], **ROUTER_LOSS)


def batch_with(mask: torch.Tensor | None) -> dict[str, Any]:
    inputs = batch()
    if mask is not None:
        inputs["attention_mask"] = mask
        inputs["labels"] = inputs["labels"].masked_fill(mask == 0, -100)
    return inputs


def run_on_one_device(name: str, inputs: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model's output, and its gradients."""
    model = build_mixture(name)
    with NoFloat32():
        output = model(**inputs)
    output.loss.backward()
    assert output.aux_loss > 0
    return output, gradients(model)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("mask", [None, PADDING_MASK], ids=["whole", "padded"])
@pytest.mark.parametrize("name", MIXTURES)
def test_whole_batches_have_the_loss_of_one_device_on_every_rank(
    name: str, mask: torch.Tensor | None, size: int
) -> None:
    """As the Trainer calls a model: gradients are averaged over the ranks."""
    expected, expected_grads = run_on_one_device(name, batch_with(mask))
    models = [build_mixture(name) for _ in range(size)]

    def train(comm: Any) -> Any:
        model = models[comm.rank]
        with wf_transformers.attach_model(model, sequence_parallel(comm)) as handle, NoFloat32():
            wf_transformers.WholeBatchHooks(model, handle)
            output = model(**batch_with(mask))
            output.loss.backward()
        assert output.router_logits is None
        return output.loss.detach(), output.aux_loss.detach(), gradients(model)

    ranks = run_threads(size, train)
    for loss, aux_loss, _ in ranks:
        assert_close(loss, expected.loss.detach(), "loss")
        assert_close(aux_loss, expected.aux_loss.detach(), "aux_loss")
    for key, expected_grad in expected_grads.items():
        assert_close(sum(grads[key] for *_, grads in ranks) / size, expected_grad, key)


def test_whole_batches_of_embeddings_have_the_loss_of_one_device() -> None:
    inputs = batch()
    expected, _ = run_on_one_device("mixtral", inputs)
    models = [build_mixture("mixtral") for _ in range(2)]

    def evaluate(comm: Any) -> torch.Tensor:
        model = models[comm.rank]
        embeddings = model.get_input_embeddings()(inputs["input_ids"])
        with wf_transformers.attach_model(model, sequence_parallel(comm)) as handle, NoFloat32():
            wf_transformers.WholeBatchHooks(model, handle)
            return model(inputs_embeds=embeddings, labels=inputs["labels"]).loss.detach()

    for loss in run_threads(2, evaluate):
        assert_close(loss, expected.loss.detach(), "loss")


@pytest.mark.parametrize("name", MIXTURES)
def test_losses_of_shards_sum_to_the_loss_of_one_device(name: str) -> None:
    """In a training loop that shards the batch itself; gradients are summed over the ranks."""
    inputs = batch_with(PADDING_MASK)
    expected, expected_grads = run_on_one_device(name, inputs)
    models = [build_mixture(name) for _ in range(2)]

    def train(comm: Any) -> Any:
        sp, model = sequence_parallel(comm), models[comm.rank]
        with wf_transformers.attach_model(model, sp), NoFloat32():
            shard = sp.shard_batch(inputs)
            num_valid = sp.sum_over_ranks(count_valid(shard["labels"]))
            kwargs = wf_transformers.forward_kwargs(model, shard, num_valid=num_valid)
            output = model(**kwargs)
            output.loss.backward()
        return output.loss.detach(), gradients(model)

    ranks = run_threads(2, train)
    assert_close(sum(loss for loss, _ in ranks), expected.loss.detach(), "loss")
    for key, expected_grad in expected_grads.items():
        assert_close(sum(grads[key] for _, grads in ranks), expected_grad, key)


def test_batch_without_an_attention_mask_is_refused() -> None:
    """A shard may end with padding of `shard_batch`, which must not count."""

    def forward(comm: Any) -> None:
        sp, model = sequence_parallel(comm), build_mixture("mixtral")
        with wf_transformers.attach_model(model, sp):
            shard = sp.shard_batch(batch())
            with pytest.raises(ValueError, match="have an attention_mask in the batch"):
                model(**wf_transformers.forward_kwargs(model, shard))

    run_threads(2, forward)


def test_verify_accepts_a_mixture_with_router_loss() -> None:
    models = [build_mixture("mixtral") for _ in range(2)]

    def verify(comm: Any) -> Any:
        sp, model = sequence_parallel(comm), models[comm.rank]
        return wf_transformers.verify(
            model, sp, lambda: wf_transformers.attach_model(model, sp), "strict"
        )

    assert all(report is not None for report in run_threads(2, verify))
