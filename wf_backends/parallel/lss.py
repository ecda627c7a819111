"""LSS Transformer: one fused gather forward, one fused reduction backward.

Every rank keeps its own queries and gathers one buffer [K|V]; backward it sends one buffer
[dK|dV] home. The gathered keys are kept for the backward: 2 collectives for each attention layer.
Rows that a rank's mask does not let it see are not sent to it. Gradients of parameters are
averaged by `wf_backends.parallel.gradients.DoubleAverage`.

Source: arXiv 2311.02382. Shapes: s rows of this rank, n rows that it needs, b batch, g key heads, d
head_dim of keys, e of values.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from wf_backends.comm import Communicator, Pass, move
from wf_backends.lowering import Gather, Parcel, RankProgram
from wf_backends.parallel.attention import DistributedAttention
from wf_backends.parallel.softmax import Softmax
from wf_backends.runtime import (
    Accumulators,
    Attention,
    Call,
    Messages,
    Total,
    add,
    fuse,
    gather,
    send_home,
    unfuse,
)
from wf_backends.schedule import Mask


class LssAttention(DistributedAttention):
    """Attention by the "all_gather" route, with the gathered keys kept for the backward."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        softmax: Softmax,
        seqlen: int | None,
        layer: str | None = None,
    ) -> Tensor:
        """softmax(scores + mask) v for this rank's rows; see SequenceParallel.attention."""
        planned, _ = self.call(q, k, v, mask, softmax, seqlen, layer)
        both = planned.backward  # in which keys are brought together at once
        rows, local = both.walk, _local(both)
        now = planned.now
        there = partial(_fetch, self.comm, rows, now)
        back = partial(_return, self.comm, rows, now.back())
        held = move(fuse(k, v), there, back, "lss")  # (n, b, g, d + e)
        k, v = unfuse(held.transpose(0, 1), k.shape[3])
        alone = self.comm.view([self.comm.rank])
        call = Call(local, local, alone, planned.kernel, planned.scores, now=now)
        return Attention.apply(q, k, v, call, *softmax.learned)


def _local(program: RankProgram) -> RankProgram:
    """The program of a rank that has all rows of its one step already."""
    (step,) = program.steps
    held = (Parcel(0, ((0, step.num_rows),)),)
    walk = Gather(step.num_rows, step.num_rows, held, held)
    only = replace(step, home_out=held, home_in=held)
    return replace(program, rank=0, walk=walk, steps=(only,))


def _fetch(comm: Communicator, rows: Gather, now: Pass, kv: Tensor, label: str) -> Tensor:
    """The rows that this rank needs, from all ranks."""
    comm.enter(now)
    messages = Messages(comm, label)
    (held,) = gather(messages, rows, (kv,))
    messages.deliver()
    return held


def _return(comm: Communicator, rows: Gather, now: Pass, grad: Tensor, label: str) -> Tensor:
    """The sum over all ranks of the gradients of this rank's rows."""
    comm.enter(now)
    dtype = torch.promote_types(grad.dtype, torch.float32)
    messages = Messages(comm, label)
    total = Total(rows.shard_rows, Accumulators((grad.shape[1:],), (0.0,), dtype, grad.device, add))
    total.buffers()  # a sum of its own, not begun in what is given: that is autograd's, and narrow
    send_home(messages, rows, (grad,), total)
    messages.deliver()
    return total.buffers()[0].to(grad.dtype)
