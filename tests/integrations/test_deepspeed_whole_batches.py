"""A model under the handle of a DeepSpeed engine takes whole batches, as unmodified scripts give.

Two ranks as threads, in float64, beside the same model on one device without WallFacer. Llama
rounds to float32 inside its norms: losses and gradients agree to 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed", exc_type=ImportError)
pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

import torch  # noqa: E402
import transformers as tf  # noqa: E402

from tests.helpers import run_threads  # noqa: E402
from tests.integrations.mean_gradients import assert_mean_gradients  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    LLAMA,
    assert_close,
    batch,
    build,
    gradients,
    sequence_parallel,
)
from wf_backends import SequenceParallel  # noqa: E402
from wf_deepspeed import Block, WallFacer  # noqa: E402
from wf_transformers import WholeBatchHooks, attach_model  # noqa: E402

pytestmark = pytest.mark.deepspeed

IDS = batch(seqlen=24)["input_ids"]


def take_whole_batches(model: Any, sp: SequenceParallel) -> None:
    """Attach the model and hook it, as `wf_deepspeed.opened()` does with an engine's module."""
    no_groups: Any = None  # the hooks use none
    handle = attach_model(model, sp)
    wallfacer = WallFacer(handle, Block(sp.config), no_groups, torch.device("cpu"), lambda: 1)
    WholeBatchHooks(model, wallfacer)


def on_two_ranks(family: str, call: Callable[[Any], Any], layout: str = "zigzag") -> list[Any]:
    """`call(model)` by rank, with a model that takes whole batches."""

    def rank(comm: Any) -> Any:
        model = build(family, "eager", {})
        take_whole_batches(model, sequence_parallel(comm, layout))
        return call(model)

    return run_threads(2, rank)


def batch_with_masked_labels() -> dict[str, Any]:
    labelled = batch(2, seqlen=24)
    labelled["labels"][:, 3:15] = -100
    return labelled


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_training_gives_every_rank_the_loss_of_the_whole_batch(family: str) -> None:
    """Llama's labels are those of the next token, BERT's are not."""
    labelled = batch_with_masked_labels()
    reference = build(family, "sdpa", {})
    expected = reference(**labelled).loss
    expected.backward()

    def train(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = model(**labelled).loss
        loss.backward()
        return loss.detach(), gradients(model)

    (first_loss, first_grads), (second_loss, second_grads) = on_two_ranks(family, train)
    assert torch.equal(first_loss, second_loss)
    assert first_loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert_mean_gradients([first_grads, second_grads], gradients(reference))


@pytest.mark.parametrize("num_items", [None, 40])
def test_the_loss_of_an_evaluation_is_divided_by_the_trainers_number_of_labels(
    num_items: int | None,
) -> None:
    """From release 5 on, transformers' Trainer passes the number in evaluation, too."""
    labelled = batch_with_masked_labels()
    reference = build("llama", "sdpa", {}).eval()
    expected = reference(**labelled, num_items_in_batch=num_items).loss

    def evaluate(model: Any) -> torch.Tensor:
        return model.eval()(**labelled, num_items_in_batch=num_items).loss.detach()

    for loss in on_two_ranks("llama", evaluate):
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("labels", [{}, {"labels": IDS}], ids=["unlabelled", "labelled"])
def test_logits_of_documents_are_in_the_order_of_the_batch(labels: dict[str, Any]) -> None:
    """The layout document_zigzag gives each rank parts of every document."""
    borders, reference = (0, 5, 16, 24), build("llama", "sdpa", {})
    documents = [IDS[:, start:end] for start, end in zip(borders, borders[1:], strict=False)]
    expected = torch.cat([reference(document).logits for document in documents], dim=1)
    positions = torch.cat([torch.arange(document.shape[1]) for document in documents])[None]

    def evaluate(model: Any) -> torch.Tensor:
        return model.eval()(IDS, position_ids=positions, **labels).logits.detach()

    for logits in on_two_ranks("llama", evaluate, "document_zigzag"):
        assert_close(logits, expected, "logits")


class ReturnsMean(torch.nn.Module):
    """A module around a model, which returns a tensor and no output."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.inner(input_ids, **kwargs).logits.mean()


class TakesNoPositions(ReturnsMean):
    """A module around a model, whose forward has no argument for positions."""

    def forward(self, input_ids: torch.Tensor, labels: Any = None) -> torch.Tensor:
        return self.inner(input_ids, labels=labels).loss


SPANS = {"start_positions": IDS[:, 0] * 0, "end_positions": IDS[:, 0] * 0}


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (tf.LlamaModel, {"labels": IDS}, "none of transformers' causal or masked"),
        (tf.LlamaForQuestionAnswering, {**SPANS, "attention_mask": (IDS > 9).long()}, "one length"),
        (tf.LlamaForSequenceClassification, {"output_hidden_states": True}, "output_hidden_states"),
        (tf.LlamaForSequenceClassification, {"return_dict": False}, "return_dict=False"),
        (tf.LlamaModel, {}, r"returns \['last_hidden_state'\].*must return \"logits\""),
        (tf.LlamaForCausalLM, {"output_hidden_states": True}, "output_hidden_states=True"),
        (tf.LlamaForCausalLM, {"logits_to_keep": 1}, "logits_to_keep.*on one process"),
        (tf.LlamaForCausalLM, {"output_router_logits": True}, "output_router_logits"),
        (lambda config: ReturnsMean(tf.LlamaForCausalLM(config)), {}, "returns a Tensor"),
        (
            lambda config: TakesNoPositions(tf.LlamaForCausalLM(config)),
            {},
            "forward takes no position_ids",
        ),
    ],
)
def test_models_and_arguments_that_cannot_be_cut_are_refused(
    make: Callable[[Any], Any], arguments: dict[str, Any], message: str
) -> None:
    def rank(comm: Any) -> None:
        model = make(tf.LlamaConfig(**LLAMA, pad_token_id=0))
        take_whole_batches(model, sequence_parallel(comm))
        with pytest.raises((NotImplementedError, ValueError), match=message):
            model(IDS, **arguments)

    run_threads(2, rank)
