"""Each rank computes a part of the sinks' gradient; DDP and ZeRO sum the parts exactly."""

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

NUM_HEADS, HEAD_DIM, SEQLEN = 4, 8, 24
WIDTH = NUM_HEADS * HEAD_DIM
OPTIONS: dict[str, dict[str, Any]] = {
    "ring": {"route": "ring"},
    "ulysses": {"route": "ring", "ulysses_degree": 2, "ulysses_chunks": 2},
}
STAGES = (1, 2, 3)


class Layer(nn.Module):
    """Attention with sinks over this rank's rows, and the sum of its squares."""

    def __init__(self, sp: SequenceParallel) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sp = sp
        self.qkv, self.sinks = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.randn(NUM_HEADS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, NUM_HEADS, HEAD_DIM)).unbind(2)
        return self.sp.attention(q, k, v, causal=True, sinks=self.sinks).square().sum()


def all_rows() -> Tensor:
    return torch.randn(1, SEQLEN, WIDTH, generator=torch.Generator().manual_seed(1))


def loss(model: Any, sp: SequenceParallel) -> Tensor:
    """The loss of this rank's rows, times the ranks, by which engines divide the gradients."""
    return model(sp.shard(all_rows())) * sp.size


def ddp_gradients(sp: SequenceParallel) -> list[Tensor]:
    layer = DistributedDataParallel(Layer(sp))
    loss(layer, sp).backward()
    return [p.grad for p in layer.parameters() if p.grad is not None]


def zero_gradients(sp: SequenceParallel, stage: int) -> list[Tensor]:
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    import wf_deepspeed

    layer = Layer(sp)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    with wf_deepspeed.without_shared_memory_op():
        deepspeed.init_distributed("gloo")
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        engine, *_ = deepspeed.initialize(model=layer, optimizer=optimizer, config=config)
        engine.backward(loss(engine, sp))
        grads = [safe_get_full_grad(p).clone() for p in layer.parameters()]
    engine.destroy()
    return grads


def gradients_by_engine(comm: Communicator) -> dict[str, list[Tensor]]:
    """Gradients of the sinks and of the projection."""
    os.environ["LOCAL_RANK"] = str(comm.rank)  # DeepSpeed asks for a launcher's
    gradients = {}
    for name, options in OPTIONS.items():
        config = SequenceParallelConfig.from_dict({"sequence_parallel_size": comm.size, **options})
        sp = SequenceParallel(config, dist.new_group())
        gradients[f"ddp, {name}"] = ddp_gradients(sp)
        for stage in STAGES:
            gradients[f"zero {stage}, {name}"] = zero_gradients(sp, stage)
    return gradients


def test_ddp_and_zero_sum_the_gradient_of_the_sinks() -> None:
    """One job for all engines, each of which would start ranks for seconds. In float32."""
    layer = Layer(SequenceParallel(SequenceParallelConfig(), World(1).comm(0)))
    layer(all_rows()).backward()
    expected = [p.grad for p in layer.parameters()]
    for gradients in run_processes(2, gradients_by_engine, timeout=240, start=python()):
        assert len(gradients) == len(OPTIONS) * (1 + len(STAGES))
        for engine, grads in gradients.items():
            for actual, reference in zip(grads, expected, strict=True):
                assert reference is not None and actual.shape == reference.shape
                assert (actual - reference).norm() < 1e-5 * reference.norm(), engine
