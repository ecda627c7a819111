"""A model that computes its own loss and takes whole batches: its loss is one device's, or refused.

Ranks are threads, in float64; Llama rounds to float32 inside its norms: losses agree to 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

from torch.nn.functional import cross_entropy, pad  # noqa: E402
from transformers.loss.loss_utils import ForCausalLMLoss  # noqa: E402
from transformers.modeling_outputs import CausalLMOutput  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaForCausalLM  # noqa: E402

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.mean_gradients import assert_mean_gradients  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    batch,
    build,
    gradients,
    sequence_parallel,
)
from wf_backends.autochunk.tiling.handle import Handle  # noqa: E402
from wf_backends.autochunk.tiling.tiled_loss import tile_loss  # noqa: E402
from wf_transformers import WholeBatchHooks, attach, attach_model  # noqa: E402
from wf_transformers.whole_batches.custom_loss import (  # noqa: E402
    divides_by_items,
    refuse_custom_loss,
)

LABELLED = batch(2)
LABELLED["labels"][:, 3:9] = -100
LABELS = LABELLED["labels"]
WEIGHTS = torch.linspace(0.1, 2.0, LABELS.numel()).view_as(LABELS).double()


def z_loss(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    """A `loss_function`: cross entropy and a penalty on the logits' normalisers."""
    entropy = ForCausalLMLoss(logits, labels, vocab_size, **kwargs)
    return entropy + 0.1 * logits.logsumexp(-1).pow(2).mean()


def weighted_loss(
    logits: Tensor, labels: Tensor, vocab_size: int, token_weights: Tensor, **_: Any
) -> Tensor:
    token_losses = cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none"
    )
    return (token_losses * token_weights[:, 1:].flatten()).sum() / token_weights.sum()


def passes_all(self: Any, labels: Tensor, **kwargs: Any) -> Tensor:
    """A forward that Liger's kernels put into a class of transformers."""
    return self.loss_function(labels, **kwargs)


def passes_items(self: Any, labels: Tensor, num_items_in_batch: int) -> Tensor:
    return self.loss_function(labels=labels, num_items_in_batch=num_items_in_batch)


def passes_labels(self: Any, labels: Tensor, **kwargs: Any) -> Tensor:
    self.check(**kwargs)
    return self.loss_function(labels)


class LossInForward(LlamaForCausalLM):
    """Adds a penalty to the loss in its forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output: Any = super().forward(*args, **kwargs)
        if output.loss is not None:
            output.loss = output.loss + 0.1 * output.logits.logsumexp(-1).pow(2).mean()
        return output


class LossOfWrapper(nn.Module):
    """A module around a model, which returns a loss and nothing else."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Tensor:
        output = self.inner(input_ids, labels=labels, **kwargs)
        return output.loss - 0.2 * output.logits.softmax(-1).pow(2).mean()


class LossOfSamples(LossOfWrapper):
    """Takes a label for each sample, not for each token."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Tensor:
        scores = self.inner(input_ids, **kwargs).logits[:, -1].mean(-1)
        return (scores - labels).square().mean()


class LossWithoutHead(LlamaForCausalLM):
    """Uses the head's weight and does not call the head, as models with a fused loss do."""

    def forward(self, labels: Any = None, **kwargs: Any) -> Any:
        states = self.model(**kwargs).last_hidden_state
        return {"loss": (states @ self.lm_head.weight.T).mean(), "logits": states}


class LossOfHiddenStates(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output: Any = super().forward(*args, output_hidden_states=True, **kwargs)
        output.loss = output.loss + output.hidden_states[1].mean()
        output.hidden_states = None
        return output


def lce_forward(
    self: Any,
    input_ids: Tensor,
    labels: Any = None,
    skip_logits: bool | None = None,
    num_items_in_batch: Any = None,
    **kwargs: Any,
) -> CausalLMOutput:
    """As Liger's, without its kernel: in training a loss and no logits."""
    shift_labels = kwargs.pop("shift_labels", None)
    states = self.model(input_ids, **kwargs).last_hidden_state
    if labels is None or not (self.training if skip_logits is None else skip_logits):
        return CausalLMOutput(logits=self.lm_head(states))
    if shift_labels is None:
        shift_labels = pad(labels, (0, 1), value=-100)[:, 1:]
    logits, targets = states @ self.lm_head.weight.T, shift_labels.flatten()
    loss_sum = cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
    return CausalLMOutput(loss=loss_sum / (num_items_in_batch or (targets != -100).sum()))


lce_forward.__module__ = "liger_kernel.transformers.model.llama"


def early_lce_forward(self: Any, input_ids: Tensor, **kwargs: Any) -> CausalLMOutput:
    raise AssertionError("is not called")


early_lce_forward.__module__ = lce_forward.__module__
Change = Callable[[Any], Any]
"""Takes a Llama and returns it, or a module around it, with another loss."""


def with_loss_function(function: Any) -> Change:
    def change(model: Any) -> Any:
        model.loss_function = function
        return model

    return change


def with_class(model_class: type) -> Change:
    def change(model: Any) -> Any:
        model.__class__ = model_class
        return model

    return change


def unchanged(model: Any) -> Any:
    return model


def with_lora(model: Any) -> Any:
    peft = pytest.importorskip("peft", reason="PEFT is not installed", exc_type=ImportError)
    torch.manual_seed(1)  # of the adapter's weights
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM"))


def with_liger(model: Any) -> Any:
    model.forward = MethodType(lce_forward, model)
    return model


def with_tiled_loss(model: Any) -> Any:
    tile_loss(model, model.lm_head, 2, Handle())
    return model


def build_llama(change: Change) -> Any:
    """Build a model with the same weights on every rank."""
    return change(build("llama", "eager", {}))


def loss_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output["loss"]


def train_on_ranks(
    change: Change, size: int, verify: bool = True, **arguments: Any
) -> list[tuple[Tensor, dict[str, Tensor], dict[str, int]]]:
    """(loss, gradients, bytes sent) by rank, of one call with `arguments`."""
    models = [build_llama(change) for _ in range(size)]

    def rank(comm: Any) -> tuple[Tensor, dict[str, Tensor], dict[str, int]]:
        model, sp = models[comm.rank], sequence_parallel(comm)
        WholeBatchHooks(model, attach(model, sp, verify=verify))
        loss = loss_of(model(**arguments))
        loss.backward()
        return loss.detach(), gradients(model), sp.report()

    return run_threads(size, rank)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("change", "arguments"),
    [
        (with_loss_function(z_loss), {}),
        (with_loss_function(z_loss), {"num_items_in_batch": 77}),
        (with_loss_function(weighted_loss), {"token_weights": WEIGHTS}),
        (with_class(LossInForward), {}),
        (LossOfWrapper, {}),
        (LossOfSamples, {"labels": torch.tensor([0.3, -0.2])}),
        (unchanged, {"ignore_index": 5, "labels": LABELS.clamp(min=5)}),
        (unchanged, {"shift_labels": LABELS.roll(3)}),
        (with_liger, {}),
        (with_liger, {"num_items_in_batch": 77}),
        (with_liger, {"whole_logits": True}),
    ],
    ids=[
        "z",
        "z_of_items",
        "weighted",
        "subclass",
        "wrapper",
        "samples",
        "ignore_index",
        "shift_labels",
        "liger",
        "liger_of_items",
        "liger_and_logits",
    ],
)
def test_loss_and_gradients_are_those_of_one_device(
    change: Change, arguments: dict[str, Any], size: int
) -> None:
    reference = build_llama(change)
    known = {key: x for key, x in arguments.items() if key != "whole_logits"}
    expected = loss_of(reference(**LABELLED | known))
    expected.backward()
    results = train_on_ranks(change, size, **LABELLED | arguments)
    for loss, _, _ in results:
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert_mean_gradients([grads for _, grads, _ in results], gradients(reference))


def test_a_custom_loss_of_a_padded_batch_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """On each rank: the loss may use logits at padding, which differ from one device's."""
    mask = torch.ones_like(LABELLED["input_ids"])
    mask[1, 20:] = 0
    padded = LABELLED | {"labels": LABELS.masked_fill(mask == 0, -100), "attention_mask": mask}
    train_on_ranks(with_loss_function(z_loss), 2, verify=False, **padded)
    assert caplog.text.count("logits at padding differ from those of one device") == 2


@pytest.mark.parametrize(
    "change", [unchanged, with_lora, with_tiled_loss], ids=["llama", "lora", "tiled"]
)
def test_logits_of_the_usual_loss_are_not_gathered(change: Change) -> None:
    expected = build_llama(unchanged)(**LABELLED).loss
    for loss, _, sent in train_on_ranks(change, 2, **LABELLED):
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        assert not any("unshard" in label for label in sent)


def test_a_loss_of_ligers_kernels_makes_no_logits() -> None:
    """In training, and in evaluation where `skip_logits` asks for the loss alone."""
    models = [build_llama(lambda model: with_lora(with_liger(model))) for _ in range(2)]

    def rank(comm: Any) -> tuple[list[Any], float, tuple[int, ...]]:
        model, sp = models[comm.rank], sequence_parallel(comm)
        WholeBatchHooks(model, attach(model, sp))
        calls: list[Any] = []
        model.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
        losses = [model(**LABELLED).loss, model.eval()(**LABELLED, skip_logits=True).loss]
        assert not calls and not any("unshard" in label for label in sp.report())
        whole = model(**LABELLED)
        return losses, whole.loss.item(), tuple(whole.logits.shape)

    expected = build_llama(unchanged)(**LABELLED).loss.item()
    for losses, loss, shape in run_threads(2, rank):
        assert [x.item() for x in losses] + [loss] == pytest.approx([expected] * 3, rel=1e-6)
        assert shape[:2] == LABELS.shape


def test_forward_kwargs_give_ligers_kernels_the_labels_of_a_rank() -> None:
    reference = build_llama(unchanged)
    reference(**LABELLED).loss.backward()
    num_valid = int((LABELS[:, 1:] != -100).sum())
    models = [build_llama(with_liger) for _ in range(2)]

    def rank(comm: Any) -> dict[str, Tensor]:
        model, sp = models[comm.rank], sequence_parallel(comm)
        local = attach(model, sp).shard_batch(LABELLED)
        kwargs = wf_transformers.forward_kwargs(model, local, num_valid=num_valid)
        (model(**kwargs).loss * sp.size).backward()
        return gradients(model)

    assert_mean_gradients(run_threads(2, rank), gradients(reference))


def test_an_early_liger_that_shifts_labels_itself_is_refused() -> None:
    model = build_llama(unchanged)
    model.forward = MethodType(early_lce_forward, model)
    with pytest.raises(NotImplementedError, match="the forward of LlamaForCausalLM is its own"):
        refuse_custom_loss(model)


@pytest.mark.parametrize(
    ("model_class", "message"),
    [
        (LossWithoutHead, "LossWithoutHead computes a loss of its own, and its output embeddings"),
        (LossOfHiddenStates, "output_hidden_states=True"),
    ],
)
def test_a_loss_that_does_not_come_from_the_heads_logits_is_refused(
    model_class: type, message: str
) -> None:
    def rank(comm: Any) -> None:
        model = build_llama(with_class(model_class))
        WholeBatchHooks(model, attach_model(model, sequence_parallel(comm)))
        with pytest.raises(NotImplementedError, match=message):
            model(**LABELLED)

    run_threads(2, rank)


def test_a_loss_that_no_number_of_items_divides_is_that_of_one_device() -> None:
    """BERT's of transformers 5 takes the Trainer's `num_items_in_batch`, and ignores it."""
    original = build("bert", "sdpa", {})
    expected = original(**LABELLED).loss.item()

    def rank(comm: Any) -> float:
        model = deepcopy(original)
        WholeBatchHooks(model, attach_model(model, sequence_parallel(comm)))
        return model(**LABELLED, num_items_in_batch=100).loss.item()

    assert run_threads(2, rank) == pytest.approx([expected] * 2, rel=1e-9)


def test_forward_kwargs_give_no_labels_to_a_loss_that_no_number_of_items_divides() -> None:
    with pytest.raises(NotImplementedError, match="BertForMaskedLM is not divided by num_items"):
        refuse_custom_loss(build("bert", "sdpa", {}))


def test_forward_kwargs_give_no_labels_to_a_custom_loss() -> None:
    """A loss of the rank's labels alone would be wrong."""

    def rank(comm: Any) -> None:
        model, sp = build_llama(with_loss_function(z_loss)), sequence_parallel(comm)
        attach(model, sp)
        local = sp.shard_batch(LABELLED)
        with pytest.raises(
            NotImplementedError, match="loss_function of LlamaForCausalLM is z_loss"
        ):
            wf_transformers.forward_kwargs(model, local, num_valid=24)

    run_threads(2, rank)


@pytest.mark.parametrize(
    ("forward", "expected"), [(passes_all, True), (passes_items, True), (passes_labels, False)]
)
def test_items_divide_a_loss_that_gets_them(
    forward: Callable[..., Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama", "eager", {})
    assert divides_by_items(model)
    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    assert divides_by_items(model) == expected
