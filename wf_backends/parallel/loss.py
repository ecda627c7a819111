"""The loss of a rank's tokens, as its share of the mean over the valid tokens of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from wf_backends.parallel.data import IGNORE_INDEX
from wf_backends.runtime import first_order_only

MAX_UPCAST_LOGITS = 1 << 24  # at a time: 64 MiB in float32


def token_loss(logits: Tensor, labels: Tensor, num_valid: Tensor | int) -> Tensor:
    """Sum of the cross entropies of the valid local tokens / max(1, num_valid).

    With num_valid counted over all ranks, the sum over the ranks is the mean loss of one device,
    for any number of valid tokens on each rank; a rank without valid tokens has loss 0 and zero
    gradients. Logits are upcast some tokens at a time, in the forward and again in the backward.

    Args:
        logits: (..., vocab), any float dtype.
        labels: (...), integers, already shifted: the token that each position predicts, or
            IGNORE_INDEX.
        num_valid: number of tokens with a label, over all ranks that share the sequence.

    Returns:
        A scalar, float32 (float64 for float64 logits).

    Raises:
        ValueError: if the shapes of logits and labels do not fit, or labels are not integers.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels must have the shape of logits without the vocabulary, "
            f"{tuple(logits.shape[:-1])}, got {tuple(labels.shape)}"
        )
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"labels must be integers, got {labels.dtype}")
    total = _CrossEntropySum.apply(logits.flatten(0, -2), labels.flatten().long())
    return total / at_least_one(num_valid)


def count_valid(labels: Tensor) -> Tensor:
    """The number of labels other than IGNORE_INDEX, an int64 scalar on the labels' device."""
    return (labels.long() != IGNORE_INDEX).sum()  # to torch.uint8, -100 is 156


def at_least_one(num_valid: Tensor | int) -> Tensor | int:
    """max(1, num_valid): the divisor of a sum over num_valid tokens."""
    return num_valid.clamp(min=1) if isinstance(num_valid, Tensor) else max(1, num_valid)


class _CrossEntropySum(torch.autograd.Function):
    """The sum of the cross entropies of logits (n, v) and labels (n,), some rows at a time."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(logits, labels)
        total = logits.new_zeros((), dtype=torch.promote_types(logits.dtype, torch.float32))
        for rows in _row_slices(logits):  # torch's ignore_index is IGNORE_INDEX by default
            total += cross_entropy(logits[rows].to(total.dtype), labels[rows], reduction="sum")
        return total

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """dlogits = grad * (softmax(logits) - one_hot(labels)), 0 in ignored rows."""
        logits, labels = ctx.saved_tensors
        dlogits = torch.empty_like(logits)
        for rows in _row_slices(logits):
            label = labels[rows, None]
            ignored = label == IGNORE_INDEX
            probabilities = logits[rows].softmax(-1, dtype=grad.dtype)
            ones = torch.ones_like(probabilities[:, :1])
            probabilities.scatter_add_(1, label.masked_fill(ignored, 0), -ones)
            dlogits[rows] = probabilities.mul_(grad).masked_fill_(ignored, 0)
            del probabilities  # before the next ones are allocated
        return dlogits, None


def _row_slices(logits: Tensor) -> Iterator[slice]:
    """Ranges of rows of logits (n, v) that are upcast at a time."""
    step = max(1, MAX_UPCAST_LOGITS // logits.shape[1])
    return (slice(start, start + step) for start in range(0, len(logits), step))
