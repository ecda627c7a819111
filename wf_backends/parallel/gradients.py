"""Parameter gradients of ranks that share sequences: the sum over one, the mean over several.

Source: LSS Transformer's double gradient averaging, arXiv 2311.02382.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from wf_backends.comm import ConsistencyCheck, fingerprint, make_comm, sum_on_all_ranks
from wf_backends.parallel.sequence_parallel import SequenceParallel

BUCKET_BYTES = 1 << 25  # gradients that are brought together in one message


class DoubleAverage:
    """Parameter gradients summed over a sequence, then averaged over sequences.

    Call it with the parameters of a plain module after `sp.loss(...).backward()`: every rank then
    holds the gradient that one device has on the mean of all sequences' losses, however the valid
    labels are spread over the ranks.

    Args:
        sp: the ranks of one sequence.
        group: the group that sp was made of (data parallel x sequence parallel): both averages
            are one reduction over it.
        data_group: given, the reductions are two: over the sequence's ranks, and over these, the
            ranks that hold the same part of other sequences.

    Raises:
        ValueError: if `group` is no multiple of sp's ranks.
    """

    def __init__(self, sp: SequenceParallel, group: Any = None, data_group: Any = None) -> None:
        if data_group is not None:
            data = make_comm(data_group)
            self._steps = [GradientMean(sp.comm, divisor=1), GradientMean(data)]
            return
        everyone = make_comm(group)
        if everyone.size % sp.size:
            raise ValueError(
                f"group must hold a multiple of the {sp.size} ranks of a sequence, "
                f"got {everyone.size}"
            )
        self._steps = [GradientMean(everyone, divisor=everyone.size // sp.size)]

    def __call__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace the gradients; one that is missing on a rank counts as zeros."""
        chosen = list(parameters)
        for step in self._steps:
            step(chosen)


class GradientMean:
    """The sum of parameter gradients over the ranks / divisor (None: the number of ranks).

    Gradients travel in their own dtype and are summed in float32 or wider. A rank sends
    2 (P - 1) / P of their bytes.
    """

    def __init__(
        self, group: Any = None, divisor: int | None = None, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
        self.comm = make_comm(group)
        self.divisor = divisor or self.comm.size
        self.bucket_bytes = bucket_bytes
        self._consistency = ConsistencyCheck(self.comm)

    def __call__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace the gradients of all parameters that require one.

        Raises:
            ValueError: if the ranks pass different parameters.
        """
        chosen = [p for p in parameters if p.requires_grad]
        if not chosen:
            return
        shapes = [(tuple(p.shape), str(p.dtype)) for p in chosen]
        same = {"parameters": len(chosen), "their shapes and dtypes": fingerprint(shapes)}
        self._consistency.check(same, {}, chosen[0])
        for bucket in _buckets(chosen, self.bucket_bytes):
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            mean = sum_on_all_ranks(self.comm, flat, "gradients", self.divisor)
            pieces = mean.split([p.numel() for p in bucket])
            for parameter, piece in zip(bucket, pieces, strict=True):
                parameter.grad = piece.view_as(parameter).clone()


def _buckets(parameters: Sequence[nn.Parameter], limit: int) -> Iterator[list[nn.Parameter]]:
    """Neighbours of one dtype and device, `limit` bytes at most unless one alone is larger."""
    bucket: list[nn.Parameter] = []
    room = limit
    for p in parameters:
        fits = bucket and (p.dtype, p.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and not (fits and p.nbytes <= room):
            yield bucket
            bucket, room = [], limit
        bucket.append(p)
        room -= p.nbytes
    yield bucket
