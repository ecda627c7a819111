"""Models whose forward gives values by token in the place of logits, as TRL's trainers have them.

The forward here is a short one of our own, with the arguments and the fields of TRL 1.16's; the
real one is in test_trl.py.
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

from transformers.utils import ModelOutput  # noqa: E402

from tests.helpers import run_threads  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    batch,
    build,
    gradients,
    sequence_parallel,
)
from wf_transformers import WholeBatchHooks, attach  # noqa: E402
from wf_transformers.whole_batches.arguments import with_cu_seqlens  # noqa: E402
from wf_transformers.whole_batches.custom_loss import has_fused_head  # noqa: E402

IGNORED = -100
BORDERS = (0, 7, 19, 30)
Found = tuple[dict[str, Tensor], dict[str, Tensor]]


@dataclass
class ByToken(ModelOutput):
    """(b, S - 1), or (b, s) of shift_labels."""

    loss: Any = None
    log_probs: Any = None
    entropy: Any = None
    is_top1: Any = None
    label_mask: Any = None


def fuse(model: Any) -> Any:
    """The model with such a forward."""
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
        hidden = self.base_model(*args, **kwargs).last_hidden_state
        if shift_labels is None:
            hidden, shift_labels = hidden[:, :-1], labels[:, 1:]
        mask = shift_labels != IGNORED
        found = self.get_output_embeddings()(hidden).log_softmax(-1)
        picked = found.gather(-1, shift_labels.clamp(min=0)[..., None]).squeeze(-1)
        log_probs = picked.masked_fill(~mask, 0)
        right = (found.argmax(-1) == shift_labels) & mask
        loss = -log_probs.sum() / mask.sum().clamp(min=1)
        return ByToken(loss=loss, log_probs=log_probs, is_top1=right, label_mask=mask)

    model.forward = MethodType(forward, model)
    return model


def run(model: Any, loss: Callable[[Any], Tensor], given: dict[str, Any]) -> Found:
    """(fields, gradients) of a call."""
    output = model(**given, fused_lm_head=True)
    loss(output).backward()
    return {key: value.detach() for key, value in output.items()}, gradients(model)


def summed(output: Any) -> Tensor:
    """A loss as TRL makes it of them: of tokens counted elsewhere, each weighted by itself."""
    return -(output.log_probs * output.log_probs.exp().detach()).sum() / 17


def masked(given: dict[str, Any]) -> dict[str, Any]:
    """With prompts that are not learnt, and padding."""
    labels, valid = given["labels"].clone(), torch.ones_like(given["labels"])
    labels[0, :6], labels[1, 20:], valid[1, 20:] = IGNORED, IGNORED, 0
    return {"input_ids": given["input_ids"], "labels": labels, "attention_mask": valid}


def packed(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Documents as a collator without padding gives them; and as torch's attention takes them."""
    lengths = torch.tensor(BORDERS).diff().tolist()
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    of = torch.cat([torch.full((length,), at) for at, length in enumerate(lengths)])
    sees = (of[:, None] == of) & torch.ones(len(of), len(of)).tril().bool()
    hidden = torch.zeros(sees.shape, dtype=torch.float64).masked_fill(~sees, -torch.inf)
    labels = given["labels"].masked_fill(positions == 0, IGNORED)
    given = {"input_ids": given["input_ids"], "labels": labels, "position_ids": positions}
    borders = torch.tensor(BORDERS, dtype=torch.int32)
    flash = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders}
    flash |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    return given | flash, given | {"attention_mask": hidden[None, None]}


def cases() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """(for us, for one device), by name."""
    plain, padded = batch(2, BORDERS[-1]), masked(batch(2, BORDERS[-1]))
    return {"plain": (plain, plain), "padded": (padded, padded), "packed": packed(batch(1, 30))}


@pytest.mark.parametrize("loss", (summed, lambda output: output.loss), ids=("own", "its"))
@pytest.mark.parametrize("name", cases())
def test_values_by_token_are_those_of_the_whole_batch(
    name: str, loss: Callable[[Any], Tensor]
) -> None:
    """On every rank, with gradients whose mean over the ranks is one device's."""
    ours, theirs = cases()[name]
    wanted, its_grads = run(fuse(build("llama", "sdpa", {})), loss, theirs)

    def rank(comm: Any) -> Found:
        model, sp = fuse(build("llama", "eager", {})), sequence_parallel(comm)
        hooks = WholeBatchHooks(model, attach(model, sp))
        found = run(model, loss, ours)
        hooks.remove()
        return found

    ranks = run_threads(2, rank)
    for fields, _ in ranks:
        assert set(fields) == set(wanted)
        for key in ("label_mask", "is_top1"):
            assert torch.equal(fields[key], wanted[key])
        assert (fields["log_probs"] - wanted["log_probs"]).abs().max() < 1e-6
        assert fields["loss"].item() == pytest.approx(wanted["loss"].item(), rel=1e-7)
    for key, grad in its_grads.items():
        mean = sum(grads[key] for _, grads in ranks) / 2
        assert (mean - grad).abs().max() < 1e-6 * grad.abs().max() + 1e-9, key


def test_a_model_says_whether_it_has_such_a_head() -> None:
    model = build("llama", "sdpa", {})
    assert not has_fused_head(model) and has_fused_head(fuse(model))


def test_documents_that_are_said_by_our_word_count() -> None:
    borders = torch.tensor([0, 2, 4])
    given = {"cu_seq_lens_q": borders, "max_length_q": 2, "input_ids": borders}
    assert set(with_cu_seqlens(given)) == {"cu_seqlens", "input_ids"}
    assert with_cu_seqlens(given)["cu_seqlens"] == (0, 2, 4)
    assert with_cu_seqlens(given | {"cu_seqlens": (0, 4)})["cu_seqlens"] == (0, 4)
    assert with_cu_seqlens({"input_ids": borders}) == {"input_ids": borders}
