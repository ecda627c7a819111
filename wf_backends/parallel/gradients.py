"""Parameter gradients: the sum over the ranks of a sequence, the mean over sequences.

Source: LSS Transformer's double gradient averaging, arXiv 2311.02382.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import torch
from torch import nn

from wf_backends._validation import positive
from wf_backends.comm import (
    ConsistencyCheck,
    fingerprint,
    gather_small,
    make_comm,
    sum_on_all_ranks,
)
from wf_backends.parallel.sequence_parallel import SequenceParallel

BUCKET_BYTES = 1 << 25  # gradients that are reduced together


class DoubleAverage:
    """Parameter gradients summed over a sequence, then averaged over sequences.

    Call it with the parameters of a plain module after `sp.loss(...).backward()`. Every rank then
    has the gradient that one device has for the mean of all sequences' losses, also if the ranks
    have different numbers of valid labels.

    Args:
        sp: the ranks of one sequence.
        group: the group that sp was made from (data parallel x sequence parallel): one reduction
            over it computes both averages.
        data_group: the ranks that hold the same part of other sequences. If it is given, there are
            two reductions: over the ranks of the sequence, then over data_group.

    Raises:
        ValueError: if the size of `group` is not a multiple of sp's size.
    """

    def __init__(self, sp: SequenceParallel, group: Any = None, data_group: Any = None) -> None:
        if data_group is not None:
            data_comm = make_comm(data_group)
            self._reductions = [GradientMean(sp.comm, divisor=1), GradientMean(data_comm)]
            return
        comm = make_comm(group)
        if comm.size % sp.size:
            raise ValueError(
                f"group must hold a multiple of the {sp.size} ranks of a sequence, got {comm.size}"
            )
        self._reductions = [GradientMean(comm, divisor=comm.size // sp.size)]

    def __call__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace the gradients; one that is None on some ranks only counts as zeros there."""
        parameters = list(parameters)
        for reduce in self._reductions:
            reduce(parameters)


class GradientMean:
    """The sum of parameter gradients over the ranks / divisor (None: the number of ranks).

    Gradients are sent in their own dtype and summed in float32 or wider. A rank sends
    2 (P - 1) / P of their bytes.
    """

    def __init__(self, group: Any = None, divisor: int | None = None) -> None:
        self.comm = make_comm(group)
        self.divisor = self.comm.size if divisor is None else divisor
        positive("divisor", self.divisor)
        self._consistency = ConsistencyCheck(self.comm)

    def __call__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace the gradients of all parameters that have one on some rank.

        Others keep None, so that an optimizer leaves unused parameters alone, as on one device.

        Raises:
            ValueError: if the ranks pass different parameters.
            NotImplementedError: for DTensors, and for sparse gradients.
        """
        trained = [p for p in dict.fromkeys(parameters) if p.requires_grad]  # tied ones once
        # DTensors have to_local; their class is slow to import
        if any(hasattr(p, "to_local") or getattr(p.grad, "is_sparse", False) for p in trained):
            raise NotImplementedError(
                "DTensors or sparse gradients: FSDP2 averages its gradients itself, leave the "
                "mean out; give embeddings sparse=False"
            )
        if not trained:
            return
        shapes = [(tuple(p.shape), str(p.dtype)) for p in trained]
        same = {"parameters": len(trained), "their shapes and dtypes": fingerprint(shapes)}
        self._consistency.check(same, {}, trained[0])
        has_grad = torch.tensor([p.grad is not None for p in trained], dtype=torch.uint8)
        on_any_rank = gather_small(self.comm, has_grad).amax(0).tolist()
        used = [p for p, has_grad in zip(trained, on_any_rank, strict=True) if has_grad]
        for bucket in _buckets(used):
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            mean = sum_on_all_ranks(self.comm, flat, "gradients", self.divisor)
            grads = mean.split([p.numel() for p in bucket])
            for parameter, grad in zip(bucket, grads, strict=True):
                parameter.grad = grad.view_as(parameter).clone()


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters of one dtype and device, of BUCKET_BYTES together at most or a single one."""

    def kind(p: nn.Parameter) -> tuple[str, str]:
        return str(p.dtype), str(p.device)

    for _, same_type in groupby(sorted(parameters, key=kind), kind):
        bucket, num_bytes = list[nn.Parameter](), 0
        for p in same_type:
            if bucket and num_bytes + p.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, num_bytes = [], 0
            bucket.append(p)
            num_bytes += p.nbytes
        yield bucket
