"""Each rank has its part of the gradient of the sinks: DDP and ZeRO add the parts up."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.helpers import run_processes
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import Communicator, World

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

from tests.integrations.deepspeed_jobs import python  # noqa: E402

pytestmark = pytest.mark.processes

HEADS, HEAD_DIM, SEQLEN = 4, 8, 24
WORDS: tuple[dict[str, Any], ...] = (
    {"route": "ring"},
    {"route": "ring", "ulysses_degree": 2, "ulysses_chunks": 2},
)


class Layer(nn.Module):
    """Attention with sinks over this rank's rows, and the sum of its squares."""

    def __init__(self, sp: SequenceParallel) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sp, width = sp, HEADS * HEAD_DIM
        self.qkv, self.sinks = nn.Linear(width, 3 * width), nn.Parameter(torch.randn(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        return self.sp.attention(q, k, v, causal=True, sinks=self.sinks).square().sum()


def whole_x() -> Tensor:
    return torch.randn(1, SEQLEN, HEADS * HEAD_DIM, generator=torch.Generator().manual_seed(1))


def gradients(comm: Communicator) -> dict[str, list[Tensor]]:
    """Of the sinks and the weights, by engine."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    import wf_deepspeed

    os.environ["LOCAL_RANK"] = str(comm.rank)  # DeepSpeed asks for a launcher's
    found: dict[str, list[Tensor]] = {}
    for at, words in enumerate(WORDS):
        config = SequenceParallelConfig.from_dict({"sequence_parallel_size": comm.size, **words})
        sp = SequenceParallel(config, dist.new_group())
        layer = DistributedDataParallel(Layer(sp))
        (layer(sp.shard(whole_x())) * sp.size).backward()
        found[f"ddp {at}"] = [p.grad for p in layer.parameters() if p.grad is not None]
        for stage in (1, 2, 3):
            settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
            model = Layer(sp)
            with wf_deepspeed.without_shared_memory_op():
                deepspeed.init_distributed("gloo")
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                settings |= {"zero_allow_untested_optimizer": True}
                engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
                engine.backward(engine(sp.shard(whole_x())) * sp.size)
                grads = [safe_get_full_grad(p) for p in model.parameters()]
            found[f"zero {stage} {at}"] = [grad.clone() for grad in grads]
            engine.destroy()
    return found


def test_the_gradient_of_the_sinks_is_that_of_one_process():
    alone = Layer(SequenceParallel(SequenceParallelConfig(), World(1).comm(0)))
    alone(whole_x()).backward()
    right = [p.grad for p in alone.parameters()]
    for found in run_processes(2, gradients, timeout=240, start=python()):
        assert len(found) == 8
        for engine, grads in found.items():
            for got, want in zip(grads, right, strict=True):
                assert want is not None and got.shape == want.shape
                assert (got - want).norm() < 1e-5 * want.norm(), engine
