"""`WholeBatchHooks`: a model that is called with whole batches gives one device's loss and logits.

Ranks are threads, in float64; the reference is the same model without WallFacer. Llama rounds to
float32 inside its norms: losses agree to 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

from torch.utils.checkpoint import checkpoint  # noqa: E402

from tests.helpers import run_threads  # noqa: E402
from tests.integrations.deepspeed_jobs import tiny_llama  # noqa: E402
from tests.integrations.mean_gradients import assert_mean_gradients  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402  # noqa: E402
    batch,
    build,
    gradients,
    one_rank,
    sequence_parallel,
    tiny,
)
from wf_transformers import Handle, WholeBatchHooks, attach  # noqa: E402


def test_logits_without_labels_are_whole_and_pass_gradients() -> None:
    """A user's own loss of them counts once in gradients that are averaged over the ranks."""
    ids = {"input_ids": batch(2)["input_ids"]}
    reference = build("llama", "sdpa", {})
    expected = reference(**ids).logits
    expected.square().mean().backward()

    def rank(comm: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model = build("llama", "eager", {})
        WholeBatchHooks(model, attach(model, sequence_parallel(comm)))
        logits = model(**ids).logits
        logits.square().mean().backward()
        return logits.detach(), gradients(model)

    results = run_threads(2, rank)
    for logits, _ in results:
        assert (logits - expected).abs().max() < 1e-9
    assert_mean_gradients([grads for _, grads in results], gradients(reference))


@pytest.mark.parametrize("whole_logits", [False, True])
def test_calls_with_labels_return_whole_or_local_logits(whole_logits: bool) -> None:
    """The argument of the call decides; without it, evaluation returns the logits of all 24 tokens,
    and training those of the rank's 12 tokens, unless the hooks were made with whole_logits=True.

    A call for local logits in evaluation comes last: it must not be taken for one in training.
    """
    labelled = batch(seqlen=24)

    def rank(comm: Any) -> list[int]:
        model = build("llama", "eager", {})
        hooks = WholeBatchHooks(model, attach(model, sequence_parallel(comm)), whole_logits)
        outputs = [
            model(**labelled, whole_logits=True),
            model(**labelled, whole_logits=False),
            model.eval()(**labelled),
            model(**labelled, whole_logits=False),
        ]
        if whole_logits:  # otherwise they are refused: test_use_of_local_logits_in_training_...
            outputs.append(model.train()(**labelled))
        hooks.handle.remove()
        return [output.logits.shape[1] for output in outputs]

    expected = [24, 12, 24, 12] + ([24] if whole_logits else [])
    assert run_threads(2, rank) == [expected] * 2


FIRST_CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "embeddings": lambda model, ids: (
        model(inputs_embeds=model.get_input_embeddings()(ids), labels=ids).loss
    ),
    "checkpointed": lambda model, ids: checkpoint(
        lambda ids: model(input_ids=ids, labels=ids).loss, ids, use_reentrant=False
    ),
}


@pytest.mark.parametrize("call", FIRST_CALLS.values(), ids=FIRST_CALLS)
def test_the_first_batch_is_compared_inside_a_graph_of_the_caller(call: Any) -> None:
    """Whose backward the comparison must not use up, nor add to what it keeps."""
    reference, ids = build("llama", "sdpa", {}), batch(2)["input_ids"]
    call(reference, ids).backward()

    def rank(comm: Any) -> dict[str, torch.Tensor]:
        model = build("llama", "eager", {})
        WholeBatchHooks(model, attach(model, sequence_parallel(comm), verify="strict"))
        call(model, ids).backward()
        return gradients(model)

    assert_mean_gradients(run_threads(2, rank), gradients(reference), 1e-6)


def test_hooks_on_a_model_that_has_hooks_are_refused() -> None:
    """They would cut a batch twice. After `remove()` the model takes new ones."""
    labelled = batch(seqlen=24)

    def rank(comm: Any) -> tuple[float, float]:
        model, sp = build("llama", "eager", {}), sequence_parallel(comm)
        first = attach(model, sp)
        WholeBatchHooks(model, first)
        with attach(model, sp, verify=False) as second:
            with pytest.raises(ValueError, match="LlamaForCausalLM takes whole batches already"):
                WholeBatchHooks(model, second)
        loss = model(**labelled).loss.item()
        first.remove()
        WholeBatchHooks(model, attach(model, sp))
        return loss, model(**labelled).loss.item()

    for loss, loss_of_new_hooks in run_threads(2, rank):
        assert loss == loss_of_new_hooks


@pytest.mark.parametrize("name", ["LlamaForTokenClassification", "CLIPTextModel"])
def test_models_with_other_hooks_are_not_cut_twice_either(name: str) -> None:
    model = tiny(name)

    def rank(comm: Any) -> None:
        copied, sp = deepcopy(model), sequence_parallel(comm)
        WholeBatchHooks(copied, attach(copied, sp, verify=False))
        with attach(copied, sp, verify=False) as second:
            with pytest.raises(ValueError, match=f"{name} takes whole batches already"):
                WholeBatchHooks(copied, second)

    run_threads(2, rank)


USES_OF_LOGITS: dict[str, Callable[[Any], Any]] = {
    "softmax": lambda output: torch.softmax(output.logits, -1).mean(),
    "float": lambda output: output.logits.float().mean(),
    "tensor * logits": lambda output: torch.ones(()) * output.logits,
    "number * logits": lambda output: 2 * output.logits,
    "-logits": lambda output: -output.logits,
    "argmax": lambda output: output["logits"].argmax(1),
}


def refusal(use: Callable[[Any], Any], output: Any) -> str:
    """Return the message of the NotImplementedError that `use(output)` raises, "" without one."""
    try:
        use(output)
    except NotImplementedError as error:
        return str(error)
    return ""


def test_use_of_local_logits_in_training_is_refused() -> None:
    """A mean over them, which a Trainer's loss may add to `outputs.loss`, would be wrong. The
    advice works with DeepSpeed's block too: `WholeLogitsTrainer` of first_step_worker.py."""
    advice = '{**inputs, "whole_logits": True}'

    def rank(comm: Any) -> None:
        model = build("llama", "eager", {})
        WholeBatchHooks(model, attach(model, sequence_parallel(comm)))
        output = model(**batch(seqlen=24))
        output.loss.backward()
        for name, use in USES_OF_LOGITS.items():
            assert advice in refusal(use, output), name
        whole = model(**batch(seqlen=24), whole_logits=True).logits
        assert output.logits.shape == whole.shape
        predicted = output.logits[..., :-1, :].contiguous().argmax(dim=-1)  # TRL's accuracies
        assert torch.equal(predicted, whole[:, :-1].argmax(-1))
        assert not hasattr(output.logits, "an_attribute_that_tensors_lack")

    run_threads(2, rank)


@pytest.mark.parametrize("arguments", [{}, {"ignore_index": -100}], ids=["plain", "custom_loss"])
def test_labels_at_padding_are_ignored_with_one_warning(arguments: dict[str, int]) -> None:
    """Per rank, for two calls; also if the model computes its loss itself (`ignore_index`)."""
    labelled = batch(2, seqlen=24)
    mask = torch.ones(2, 24).long()
    mask[1, 20:] = 0
    labels_without_padding = labelled["labels"].masked_fill(mask == 0, -100)
    reference = build("llama", "eager", {})
    expected = reference(
        **labelled | {"labels": labels_without_padding}, attention_mask=mask
    ).loss.item()

    def rank(comm: Any) -> float:
        model = build("llama", "eager", {})
        WholeBatchHooks(model, attach(model, sequence_parallel(comm)))
        loss = model(**labelled, attention_mask=mask, **arguments).loss
        model(**labelled, attention_mask=mask, **arguments)
        return loss.item()

    with pytest.warns(UserWarning, match="4 labels of this batch are where") as warnings:
        losses = run_threads(2, rank)
    assert sum("labels of this batch" in str(warning.message) for warning in warnings) == 2
    assert losses == pytest.approx([expected] * 2, rel=1e-6)


def test_labels_of_bytes_at_padding_are_ignored() -> None:
    """Torch takes -100 for 156 in uint8."""
    labels, mask = torch.tensor([[3, 7, 156]], dtype=torch.uint8), torch.tensor([[1, 0, 0]])
    padded = {"labels": labels, "attention_mask": mask}
    with pytest.warns(UserWarning, match="2 labels of this batch are where"):
        counted = Handle(one_rank()).without_padded_labels(padded)["labels"]
    assert counted.tolist() == [[3, -100, -100]]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("count", [{}, {"num_items_in_batch": torch.tensor(0)}])
def test_a_batch_without_valid_labels_has_the_loss_nan_and_gradient_0(
    count: dict[str, Any], training: bool
) -> None:
    """As on one device: the mean over no tokens, also if the Trainer of transformers 5 counts."""
    unlabelled = batch(seqlen=24, **count)
    unlabelled["labels"][:] = -100
    assert build("llama", "eager", {}).train(training)(**unlabelled).loss.isnan()

    def rank(comm: Any) -> torch.Tensor:
        model = build("llama", "eager", {}).train(training)
        WholeBatchHooks(model, attach(model, sequence_parallel(comm), verify=False))
        loss = model(**unlabelled).loss
        loss.backward()
        grads = gradients(model)
        assert grads and not any(grad.any() for grad in grads.values())
        return loss.detach()

    for loss in run_threads(2, rank):
        assert loss.isnan()


def test_padding_needs_no_longer_position_table() -> None:
    """23 tokens on two ranks are padded to 24; the table of GPT-2 has 23 rows."""
    labelled = batch(seqlen=23)
    expected = build("gpt2", "eager", {"n_positions": 23})(**labelled).loss

    def rank(comm: Any) -> torch.Tensor:
        model = build("gpt2", "eager", {"n_positions": 23})
        WholeBatchHooks(model, attach(model, sequence_parallel(comm)))
        return model(**labelled).loss.detach()

    for loss in run_threads(2, rank):
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_remove_takes_the_hooks_from_the_model() -> None:
    model = tiny_llama()
    with attach(model, one_rank()) as handle:
        WholeBatchHooks(model, handle)
        assert model._forward_pre_hooks and model._forward_hooks
    assert not model._forward_pre_hooks and not model._forward_hooks


def test_an_error_detaches_the_model() -> None:
    model = tiny_llama()
    before = model.config._attn_implementation
    with pytest.raises(ZeroDivisionError), attach(model, one_rank()).removed_on_error() as handle:
        assert model.config._attn_implementation == handle.name
        raise ZeroDivisionError
    assert model.config._attn_implementation == before and not model._forward_pre_hooks
