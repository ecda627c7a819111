"""Logits, loss and gradients of a model on one device and on ranks, and their comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import wf_transformers
from tests.integrations.transformers_models import assert_close, gradients
from wf_backends import SequenceParallel


@dataclass(frozen=True)
class Result:
    """What a forward and a backward give."""

    logits: Tensor
    """Of all tokens."""
    loss: Tensor
    """The mean over all labels; or a rank's share, and the shares sum to the mean."""
    grads: dict[str, Tensor]
    """By parameter name."""


def run_backward(model: nn.Module, logits: Tensor, loss: Tensor) -> Result:
    loss.backward()
    return Result(logits.detach(), loss.detach(), gradients(model))


def run_on_shard(
    model: nn.Module, sp: SequenceParallel, local: dict[str, Any], **mask: Any
) -> Result:
    """The result of one rank, called with its rows; the loss is its share.

    Args:
        local: what `sp.shard_batch` or `shard_media` returned.
        mask: the documents or slices that the batch was sharded by, if the layout follows from
            them.
    """
    logits = model(**wf_transformers.forward_kwargs(model, local)).logits
    result = run_backward(model, logits, sp.loss(logits, local["labels"]))
    return Result(sp.unshard(result.logits, dim=1, **mask), result.loss, result.grads)


def run_whole_batch(model: nn.Module, batch: dict[str, Any]) -> Result:
    """The result of a model that returns the loss of the batch that it was called with."""
    output = model(**batch)
    logits = output.get("logits", output.get("logits_per_text"))
    return run_backward(model, logits, output.loss)


def run_document_by_document(model: nn.Module, batch: dict[str, Any], **inputs: Any) -> Result:
    """The reference for documents: a call of the model for each of them."""
    tokens = {k: batch[k] for k in ("input_ids", "attention_mask") if k in batch}
    borders = document_borders(batch)
    logits = [
        model(**{k: x[:, start:end] for k, x in tokens.items()}, **inputs).logits
        for start, end in zip(borders, borders[1:], strict=False)
    ]
    return with_token_loss(model, torch.cat(logits, dim=1), batch)


def with_token_loss(
    model: nn.Module, logits: Tensor, batch: dict[str, Any], masked_lm: bool = False
) -> Result:
    """The result with torch's cross entropy as its loss.

    Args:
        batch: with "labels", and possibly "attention_mask" and "cu_seqlens".
        masked_lm: whether a label belongs to its own token and not to the one before.
    """
    targets = batch["labels"]
    if "attention_mask" in batch:
        targets = targets.masked_fill(batch["attention_mask"] == 0, -100)
    if not masked_lm:
        targets = targets.roll(-1, dims=1)
        targets[:, [end - 1 for end in document_borders(batch)[1:]]] = -100
    return run_backward(model, logits, cross_entropy(logits.flatten(0, 1), targets.flatten()))


def document_borders(batch: Mapping[str, Any]) -> tuple[int, ...]:
    return batch.get("cu_seqlens") or (0, batch["input_ids"].shape[1])


def assert_shares_sum_to(
    expected: Result, results: Sequence[Result], valid: Tensor | None = None
) -> None:
    """Each rank has the logits; the ranks' losses and gradients sum to those of one device.

    The ranks' logits may have more rows: those that pad the sequence at its end.

    Args:
        valid: (b, S), the tokens whose logits are compared; None: all.
    """
    tokens = slice(None) if valid is None else valid
    for result in results:
        logits = result.logits[:, : expected.logits.shape[1]]
        assert_close(logits[tokens], expected.logits[tokens], "logits")
    assert_same_parameters(expected, results)
    assert_close(sum(result.loss for result in results), expected.loss, "loss")
    for name, grad in expected.grads.items():
        assert_close(sum(result.grads[name] for result in results), grad, name)


def assert_means_are(expected: Result, results: Sequence[Result]) -> None:
    """Each rank has the logits and the loss; the mean of the ranks' gradients, which DDP and ZeRO
    take, is that of one device. No rank has logits of padding."""
    assert_same_parameters(expected, results)
    for result in results:
        assert_close(result.logits, expected.logits, "logits")
        assert_close(result.loss, expected.loss, "loss")
    for name, grad in expected.grads.items():
        mean = sum(result.grads[name] for result in results) / len(results)
        assert_close(mean, grad, name)


def assert_same_parameters(expected: Result, results: Sequence[Result]) -> None:
    """The same parameters have gradients; one that a rank did not use has zeros."""
    for result in results:
        assert result.grads.keys() == expected.grads.keys()
