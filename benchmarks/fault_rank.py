"""One rank of a job in which one rank makes a fault on purpose; `faults.py` starts it.

mpirun -n 4 python benchmarks/fault_rank.py raise mpi FOLDER --timeout 8
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from wf_backends import SequenceParallel, SequenceParallelConfig, launch
from wf_backends.comm import own_group

NUM_LAYERS, NUM_STEPS = 3, 4
FAULTY_STEP, FAULTY_LAYER = 2, 1  # counted from 0
HEADS, HEAD_DIM, SHARD_ROWS = 4, 8, 16


class Fault(RuntimeError):
    """The error of the fault "raise"."""


def end_process(kind: str) -> None:
    """Raise an error, or end or stop this process, as one of ENDINGS says."""
    if kind == "raise":
        raise Fault("a fault on purpose")
    if kind.startswith("exit"):
        sys.exit(int(kind.removeprefix("exit ")))
    os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


CALLS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "another mask": {"causal": False},
        "another window": {"window_size": (5, 0)},
        "another scale": {"softmax_scale": 0.5},
    }
)
"""By the kind of a fault, the arguments of the faulty call that differ."""
TENSORS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "another dtype": lambda x: x.double(),
        "another batch": lambda x: x.repeat(2, 1, 1, 1),
    }
)
"""By the kind of a fault, how the tensors of the faulty call differ."""
Step = Callable[[Tensor], None]  # a training step on this rank's rows
ENDINGS = ("raise", "exit 0", "exit 3", "kill", "stop")
SKIPS = ("skip a call", "skip a backward")


class Layers(nn.Module):
    """Attention layers, of which FAULTY_LAYER makes the fault `self.fault`, if that is not empty.

    folder: the time of the fault is written there. named: attention calls name their layers.
    """

    def __init__(self, folder: Path, named: bool = True) -> None:
        super().__init__()
        self.folder, self.named = folder, named
        self.layers = nn.ModuleList(nn.Linear(HEAD_DIM, HEAD_DIM) for _ in range(NUM_LAYERS))
        self.fault = ""
        self.sp: SequenceParallel | None = None

    def set_sequence_parallel(self, sp: SequenceParallel) -> None:
        """wf_deepspeed calls this."""
        self.sp = sp

    def forward(self, x: Tensor) -> Tensor:
        """x (1, SHARD_ROWS, HEADS, HEAD_DIM) -> the same shape."""
        for index, layer in enumerate(self.layers):
            y = layer(x)
            if self.fault and index == FAULTY_LAYER:
                x = x + self._faulty_attention(y)
            else:
                x = x + self._attention(y, index)
        return x

    def _attention(self, x: Tensor, index: int, **options: Any) -> Tensor:
        assert self.sp is not None
        name = f"layers.{index}" if self.named else None
        return self.sp.attention(x, x, x, name=name, **{"causal": True} | options)

    def _faulty_attention(self, x: Tensor) -> Tensor:
        (self.folder / "fault").write_text(str(time.time()))
        if self.fault in ENDINGS:
            end_process(self.fault)
        if self.fault == "skip a call":
            return x
        if self.fault == "skip a backward":
            return self._attention(x, FAULTY_LAYER).detach()
        if self.fault in TENSORS:
            x = TENSORS[self.fault](x)
        return self._attention(x, FAULTY_LAYER, **CALLS.get(self.fault, {}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["none", *ENDINGS, *SKIPS, *CALLS, *TENSORS])
    parser.add_argument("transport", choices=["gloo", "mpi", "deepspeed"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rank", type=int, default=1, help="the rank that makes the fault")
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--unnamed", action="store_true", help="layers have no names")
    args = parser.parse_args()
    torch.manual_seed(0)
    job = launch.init(timeout=args.timeout, log_folder=args.folder)
    model = Layers(args.folder, not args.unnamed)
    if args.transport == "deepspeed":
        step = deepspeed_step(model, job.world_size)
    else:
        step = plain_step(model, job.world_size, args.transport)
    for index in range(NUM_STEPS):
        model.fault = ""
        if index == FAULTY_STEP and job.rank == args.rank and args.kind != "none":
            model.fault = args.kind
        step(torch.randn(1, SHARD_ROWS, HEADS, HEAD_DIM))
    print(f"rank {job.rank} is through", flush=True)


def plain_step(model: Layers, size: int, transport: str) -> Step:
    if transport == "mpi":
        from mpi4py import MPI

        group = MPI.COMM_WORLD
    else:
        group = own_group()
    config = SequenceParallelConfig(sequence_parallel_size=size, route="ring")
    model.sp = SequenceParallel(config, group)

    def step(x: Tensor) -> None:
        model(x).sum().backward()

    return step


def deepspeed_step(model: Layers, size: int) -> Step:
    import wf_deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
        "wallfacer": {"sequence_parallel_size": size, "route": "ring"},
    }
    with wf_deepspeed.without_shared_memory_op():
        engine, *_ = wf_deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=config
        )

    def step(x: Tensor) -> None:
        engine.backward(engine(x).sum())
        engine.step()

    return step


if __name__ == "__main__":
    main()
