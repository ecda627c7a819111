"""A model's own loss, called with whole batches, is one device's, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

from torch.nn.functional import cross_entropy  # noqa: E402
from transformers.loss.loss_utils import ForCausalLMLoss  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaForCausalLM  # noqa: E402

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    batch,
    build,
    gradients,
    sequence_parallel,
)
from wf_backends.tiling.handle import Handle  # noqa: E402
from wf_backends.tiling.tiled_loss import tile_loss  # noqa: E402
from wf_transformers import WholeBatchHooks, attach, attach_model  # noqa: E402

GIVEN = batch(2)
GIVEN["labels"][:, 3:9] = -100
WEIGHTS = torch.linspace(0.1, 2.0, GIVEN["labels"].numel()).view_as(GIVEN["labels"]).double()


def z_loss(logits: Tensor, labels: Tensor, vocab_size: int, **words: Any) -> Tensor:
    """The official door: cross entropy, and the squares of the logarithms of the sums."""
    plain = ForCausalLMLoss(logits, labels, vocab_size, **words)
    return plain + 0.1 * logits.logsumexp(-1).pow(2).mean()


def weighted(
    logits: Tensor, labels: Tensor, vocab_size: int, token_weights: Tensor, **_: Any
) -> Tensor:
    by_token = cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none"
    )
    return (by_token * token_weights[:, 1:].flatten()).sum() / token_weights.sum()


class AddsToItsLoss(LlamaForCausalLM):
    """Sets the loss in its own forward."""

    def forward(self, *args: Any, **words: Any) -> Any:
        output: Any = super().forward(*args, **words)
        if output.loss is not None:
            output.loss = output.loss + 0.1 * output.logits.logsumexp(-1).pow(2).mean()
        return output


class Wrapper(nn.Module):
    """Around a model; returns a loss and nothing else."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **words: Any) -> Tensor:
        output = self.inner(input_ids, labels=labels, **words)
        return output.loss - 0.2 * output.logits.softmax(-1).pow(2).mean()


class WithoutItsHead(LlamaForCausalLM):
    """As Trainers with a fused loss have it: the head's weight, and not the head."""

    def forward(self, labels: Any = None, **words: Any) -> Any:
        rows = self.model(**words).last_hidden_state
        return {"loss": (rows @ self.lm_head.weight.T).mean(), "logits": rows}


class WithHiddenStates(LlamaForCausalLM):
    def forward(self, *args: Any, **words: Any) -> Any:
        output: Any = super().forward(*args, output_hidden_states=True, **words)
        output.loss = output.loss + output.hidden_states[1].mean()
        output.hidden_states = None
        return output


DRAWING = Lock()  # what `make` draws, it draws after the model that was built before it


def made(make: Callable[[Any], Any]) -> Any:
    """What `make` makes of a model that is the same on every rank."""
    return make(build("llama", "eager", {}))


def with_loss(function: Any) -> Callable[[Any], Any]:
    def make(model: Any) -> Any:
        model.loss_function = function
        return model

    return make


def of_class(kind: type) -> Callable[[Any], Any]:
    def make(model: Any) -> Any:
        model.__class__ = kind
        return model

    return make


def value(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output["loss"]


def on_ranks(make: Callable[[Any], Any], size: int, verify: bool = True, **given: Any) -> list[Any]:
    """(loss, gradients, bytes sent) by rank."""

    def rank(comm: Any) -> Any:
        with DRAWING:
            model = made(make)
        sp = sequence_parallel(comm)
        WholeBatchHooks(model, attach(model, sp, verify=verify))
        loss = value(model(**given))
        loss.backward()
        return loss.detach(), gradients(model), sp.report()

    return run_threads(size, rank)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (with_loss(z_loss), {}),
        (with_loss(z_loss), {"num_items_in_batch": 77}),
        (with_loss(weighted), {"token_weights": WEIGHTS}),
        (of_class(AddsToItsLoss), {}),
        (Wrapper, {}),
        (lambda model: model, {"ignore_index": 5, "labels": GIVEN["labels"].clamp(min=5)}),
        (lambda model: model, {"shift_labels": GIVEN["labels"].roll(3)}),
    ],
    ids=["z", "z_of_items", "weighted", "subclass", "wrapper", "ignore_index", "shift_labels"],
)
def test_a_models_own_loss(make: Callable[[Any], Any], words: dict[str, Any], size: int) -> None:
    alone = made(make)
    wanted = value(alone(**GIVEN | words))
    wanted.backward()
    for loss, _, _ in (found := on_ranks(make, size, **GIVEN | words)):
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    for name, grad in gradients(alone).items():
        mean = sum(grads[name] for _, grads, _ in found) / size
        assert (mean - grad).abs().max() < 1e-6 * grad.abs().max() + 1e-9, name


def test_padding_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """Its logits are another device's; cross entropy leaves them out."""
    mask = torch.ones_like(GIVEN["input_ids"])
    mask[1, 20:] = 0
    given = GIVEN | {"labels": GIVEN["labels"].masked_fill(mask == 0, -100)}
    on_ranks(with_loss(z_loss), 2, verify=False, **given, attention_mask=mask)
    assert caplog.text.count("logits at padding are not those of one device") == 2


def with_lora(model: Any) -> Any:
    peft = pytest.importorskip("peft", reason="PEFT is not installed", exc_type=ImportError)
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM"))


def with_tiled_loss(model: Any) -> Any:
    tile_loss(model, model.lm_head, 2, Handle())
    return model


@pytest.mark.parametrize(
    "make",
    [lambda model: model, with_lora, with_tiled_loss],
    ids=["llama", "lora", "tiled"],
)
def test_logits_of_a_plain_loss_stay_on_their_ranks(make: Callable[[Any], Any]) -> None:
    wanted = made(lambda model: model)(**GIVEN).loss
    for loss, _, sent in on_ranks(make, 2, **GIVEN):
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
        assert not any("unshard" in label for label in sent)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (WithoutItsHead, "WithoutItsHead makes a loss of its own, and its output embeddings"),
        (WithHiddenStates, "output_hidden_states=True"),
    ],
)
def test_a_loss_of_anything_but_logits_is_refused(kind: type, message: str) -> None:
    def rank(comm: Any) -> None:
        model = made(of_class(kind))
        WholeBatchHooks(model, attach_model(model, sequence_parallel(comm)))
        with pytest.raises(NotImplementedError, match=message):
            model(**GIVEN)

    run_threads(2, rank)


def test_a_rank_is_not_given_its_own_labels_for_another_loss() -> None:
    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), made(with_loss(z_loss))
        attach(model, sp)
        local = sp.shard_batch(GIVEN)
        with pytest.raises(
            NotImplementedError, match="loss_function of LlamaForCausalLM is z_loss"
        ):
            wf_transformers.forward_kwargs(model, local, num_valid=24)

    run_threads(2, rank)
