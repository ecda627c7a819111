"""The loss of a sequence-parallel group, as ColossalAI's averages of gradients want it."""

from __future__ import annotations

from typing import Any

from colossalai.shardformer.layer.loss import cross_entropy_1d
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from wf_backends import SequenceParallel
from wf_backends.parallel import count_valid


def group_loss(
    sp: SequenceParallel,
    logits: Tensor,
    labels: Tensor,
    vocabulary: int | None = None,
    tensor_parallel: ProcessGroup | None = None,
) -> Tensor:
    """Mean cross entropy over the valid labels of the whole sequence, the same on every rank of sp.

    Its gradient is this rank's share times sp.size, because ColossalAI averages gradients over
    data parallel x sequence parallel.

    Args:
        sp: the sequence parallelism of this rank.
        logits: (b, s, vocabulary), or this rank's columns of a vocabulary that is split.
        labels: (b, s), shifted.
        vocabulary: columns over all tensor-parallel ranks with their padding, if it is split.
        tensor_parallel: the group that it is split over.

    Returns:
        A scalar, float32 or wider, whatever the dtype of the logits.
    """
    if tensor_parallel is None or vocabulary is None:
        share = sp.loss(logits, labels)
    else:
        num_valid = sp.sum_over_ranks(count_valid(labels)).clamp(min=1)
        share = _split_vocabulary_sum(logits, labels, vocabulary, tensor_parallel) / num_valid
    return _SumOfShares.apply(share, sp)


class _SumOfShares(Function):
    """Forward: the sum over the ranks. Backward: the gradient times the number of ranks."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, sp: SequenceParallel) -> Tensor:
        ctx.size = sp.size
        return sp.sum_over_ranks(share)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.size, None


def _split_vocabulary_sum(
    logits: Tensor, labels: Tensor, vocabulary: int, group: ProcessGroup
) -> Tensor:
    """Sum of the cross entropies of this rank's tokens, its logits split over the vocabulary."""
    wide = logits.float()
    return cross_entropy_1d(
        wide.flatten(0, -2),
        labels.flatten(),
        process_group=group,
        vocab_size=vocabulary,
        dtype=wide.dtype,
        mode="sum",
    )


def split_vocabulary(model: nn.Module, logits: Tensor) -> int | None:
    """Columns of the vocabulary with padding if `logits` hold only some of them, else None."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    wanted = getattr(getattr(model, "config", None), "vocab_size", 0)
    return head.out_features if head is not None and logits.shape[-1] < wanted else None
