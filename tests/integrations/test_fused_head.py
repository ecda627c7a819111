"""Models with a fused LM head: the forward returns values per token in the place of logits.

The forward here is short; it has the arguments and fields of TRL 1.16's, which test_trl.py runs.
Ranks are threads, in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func  # noqa: E402
from transformers.utils import ModelOutput  # noqa: E402

from tests.helpers import run_threads  # noqa: E402
from tests.integrations import families  # noqa: E402
from tests.integrations.mean_gradients import assert_mean_gradients  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    batch,
    build,
    gradients,
    sequence_parallel,
)
from wf_transformers import (  # noqa: E402
    ModelOptions,
    WholeBatchHooks,
    attach,
    attach_by,
    attach_model,
)
from wf_transformers.whole_batches.arguments import with_cu_seqlens  # noqa: E402
from wf_transformers.whole_batches.custom_loss import has_fused_head  # noqa: E402
from wf_transformers.whole_batches.log_probabilities import LogProbabilityHooks  # noqa: E402

IGNORED = -100
BORDERS = (0, 7, 19, 30)
Batch = dict[str, Any]
Result = tuple[dict[str, Tensor], dict[str, Tensor]]
"""(fields of the output, gradients by parameter)."""


@dataclass
class FusedOutput(ModelOutput):
    """`log_probs`, `is_top1`, `label_mask`: (b, S - 1); with `shift_labels` (b, s), as they are."""

    loss: Any = None
    log_probs: Any = None
    entropy: Any = None
    is_top1: Any = None
    label_mask: Any = None
    aux_loss: Any = None


def with_fused_head(model: Any) -> Any:
    """Replace the model's forward by one with the argument `fused_lm_head`."""
    original = model.forward

    @functools.wraps(type(model).forward)
    def forward(
        self: Any,
        *args: Any,
        fused_lm_head: bool = False,
        labels: Any = None,
        shift_labels: Any = None,
        **kwargs: Any,
    ) -> Any:
        if not fused_lm_head:
            return original(*args, labels=labels, **kwargs)
        if getattr(self.config, "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        inner = self.base_model(*args, **kwargs)
        hidden = inner.last_hidden_state
        if shift_labels is None:
            hidden, shift_labels = hidden[:, :-1], labels[:, 1:]
        mask = shift_labels != IGNORED
        log_softmax = self.get_output_embeddings()(hidden).log_softmax(-1)
        targets = shift_labels.clamp(min=0)[..., None]
        log_probs = log_softmax.gather(-1, targets).squeeze(-1).masked_fill(~mask, 0)
        is_top1 = (log_softmax.argmax(-1) == shift_labels) & mask
        loss = -log_probs.sum() / mask.sum().clamp(min=1)
        output = FusedOutput(loss=loss, log_probs=log_probs, is_top1=is_top1, label_mask=mask)
        if kwargs.get("output_router_logits"):
            experts = self.num_experts, self.num_experts_per_tok
            output["aux_loss"] = load_balancing_loss_func(inner.router_logits, *experts)
            output["loss"] = loss + self.router_aux_loss_coef * output.aux_loss
        return output

    model.forward = MethodType(forward, model)
    return model


def run_fused(model: Any, loss_of: Callable[[Any], Tensor], arguments: Batch) -> Result:
    output = model(**arguments, fused_lm_head=True)
    loss_of(output).backward()
    return {name: value.detach() for name, value in output.items()}, gradients(model)


def weighted_log_probs(output: Any) -> Tensor:
    """A loss as TRL computes it: weighted per token, over a number of tokens counted elsewhere."""
    return -(output.log_probs * output.log_probs.exp().detach()).sum() / 17


def loss_of_output(output: Any) -> Tensor:
    return output.loss


def padded_batch() -> Batch:
    """A prompt without labels in the first sample, padding in the second."""
    padded = batch(2, BORDERS[-1])
    mask = torch.ones_like(padded["labels"])
    padded["labels"][0, :6] = IGNORED
    padded["labels"][1, 20:] = IGNORED
    mask[1, 20:] = 0
    return padded | {"attention_mask": mask}


def packed_batches() -> tuple[Batch, Batch]:
    """Documents as a collator without padding gives them, and the same with a dense mask."""
    lengths = torch.tensor(BORDERS).diff().tolist()
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    causal = torch.ones(len(document), len(document), dtype=torch.bool).tril()
    seen = causal & (document[:, None] == document)
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    packed = batch(1, BORDERS[-1], position_ids=positions)
    packed["labels"][positions == 0] = IGNORED  # the first token of a document is not predicted
    borders = torch.tensor(BORDERS, dtype=torch.int32)
    flash_arguments = {
        "cu_seq_lens_q": borders,
        "cu_seq_lens_k": borders,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }
    return packed | flash_arguments, packed | {"attention_mask": mask[None, None]}


PLAIN, PADDED = batch(2, BORDERS[-1]), padded_batch()
BATCHES = {"plain": (PLAIN, PLAIN), "padded": (PADDED, PADDED), "packed": packed_batches()}
"""(the arguments on ranks, those of the reference)."""


@pytest.mark.parametrize("loss_of", [weighted_log_probs, loss_of_output])
@pytest.mark.parametrize("name", BATCHES)
def test_every_rank_has_the_values_of_all_tokens_and_gradients_are_those_of_one_device(
    name: str, loss_of: Callable[[Any], Tensor]
) -> None:
    """Llama rounds to float32 inside its norms: log-probabilities agree to 1e-6."""
    arguments, reference_arguments = BATCHES[name]
    reference = with_fused_head(build("llama", "sdpa", {}))
    expected, expected_grads = run_fused(reference, loss_of, reference_arguments)

    def rank(comm: Any) -> Result:
        model = with_fused_head(build("llama", "eager", {}))
        hooks = WholeBatchHooks(model, attach(model, sequence_parallel(comm)))
        result = run_fused(model, loss_of, arguments)
        hooks.handle.remove()
        return result

    results = run_threads(2, rank)
    for fields, _ in results:
        assert set(fields) == set(expected)
        assert torch.equal(fields["label_mask"], expected["label_mask"])
        assert torch.equal(fields["is_top1"], expected["is_top1"])
        assert (fields["log_probs"] - expected["log_probs"]).abs().max() < 1e-6
        assert fields["loss"].item() == pytest.approx(expected["loss"].item(), rel=1e-7)
    assert_mean_gradients([grads for _, grads in results], expected_grads)


def test_padding_on_the_left_stays_there_and_a_call_without_labels_has_whole_logits() -> None:
    """In trainers of log-probabilities (DPO); the others' models take padding on the right."""
    padded = {key: x.flip(1) for key, x in PADDED.items()}
    padded["labels"][1, : 30 - 20 + 1] = IGNORED  # the first token follows padding
    expected, _ = run_fused(with_fused_head(build("llama", "sdpa", {})), loss_of_output, padded)

    def rank(comm: Any) -> tuple[dict[str, Tensor], Any]:
        model = with_fused_head(build("llama", "eager", {}))
        LogProbabilityHooks(model, attach(model, sequence_parallel(comm)))
        fields, _ = run_fused(model, loss_of_output, padded)
        return fields, model(input_ids=padded["input_ids"]).logits

    for fields, logits in run_threads(2, rank):
        assert torch.equal(fields["label_mask"], expected["label_mask"])
        assert (fields["log_probs"] - expected["log_probs"]).abs().max() < 1e-6
        assert isinstance(logits, Tensor) and logits.shape[:2] == padded["input_ids"].shape


def test_a_mixture_of_experts_has_the_routers_loss_of_all_tokens() -> None:
    """TRL's trainers add it to their loss; with a fused head no logits are in the output."""
    routers = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
    reference = with_fused_head(families.build(families.FAMILIES["mixtral"], **routers))
    expected, expected_grads = run_fused(reference, loss_of_output, PLAIN)

    def rank(comm: Any) -> Result:
        model = with_fused_head(families.build(families.FAMILIES["mixtral"], **routers))
        WholeBatchHooks(model, attach(model, sequence_parallel(comm)))
        return run_fused(model, loss_of_output, PLAIN)

    results = run_threads(2, rank)
    for fields, _ in results:
        for name in ("aux_loss", "loss"):
            assert fields[name].item() == pytest.approx(expected[name].item(), rel=1e-6), name
    assert_mean_gradients([grads for _, grads in results], expected_grads)


class Adapted(torch.nn.Module):
    """A model around another one, as PEFT's."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, fused_lm_head: bool = False, shift_labels: Any = None, **inputs: Any) -> Any:
        return self.model(fused_lm_head=fused_lm_head, shift_labels=shift_labels, **inputs)


def test_a_fused_head_in_a_wrapper_passes_the_comparison_on_the_first_batch() -> None:
    """The loss of the model inside is that of a rank's tokens."""
    whole = batch(2, 24)

    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), Adapted(with_fused_head(build("llama", "sdpa", {})))
        handle = attach_by(
            ModelOptions(verify="strict"), model, sp, lambda: attach_model(model, sp)
        )
        WholeBatchHooks(model, handle)
        model(**whole, fused_lm_head=True).loss.backward()

    run_threads(2, rank)


def test_a_fused_head_is_found_by_the_argument_of_the_forward() -> None:
    model = build("llama", "sdpa", {})
    assert not has_fused_head(model)
    assert has_fused_head(with_fused_head(model))


CU_SEQLENS = torch.tensor([0, 2, 4])
FLASH_ARGUMENTS = {"cu_seq_lens_q": CU_SEQLENS, "max_length_q": 2, "input_ids": CU_SEQLENS}


def test_documents_of_flash_attentions_arguments_become_cu_seqlens() -> None:
    arguments = with_cu_seqlens(FLASH_ARGUMENTS)
    assert set(arguments) == {"cu_seqlens", "input_ids"}
    assert arguments["cu_seqlens"] == (0, 2, 4)


def test_given_cu_seqlens_come_before_flash_attentions_arguments() -> None:
    assert with_cu_seqlens(FLASH_ARGUMENTS | {"cu_seqlens": (0, 4)})["cu_seqlens"] == (0, 4)


def test_arguments_without_documents_are_unchanged() -> None:
    assert with_cu_seqlens({"input_ids": CU_SEQLENS}) == {"input_ids": CU_SEQLENS}


def test_an_average_over_tokens_needs_their_number() -> None:
    """It would silently be an average over sequences."""

    def rank(comm: Any) -> None:
        model = with_fused_head(build("llama", "eager", {}))
        with attach(model, sequence_parallel(comm), verify=False) as handle:
            handle.averages_tokens = True  # as DeepSpeed's "loss_average": "token"
            WholeBatchHooks(model, handle)
            with pytest.raises(NotImplementedError, match='fused_lm_head=True, and "loss_average"'):
                model(**PLAIN, fused_lm_head=True)
            model(**PLAIN, fused_lm_head=True, num_items_in_batch=40)

    run_threads(2, rank)
