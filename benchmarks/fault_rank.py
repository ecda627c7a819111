"""One rank of a job in which one of them makes a fault; `faults.py` starts it.

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

LAYERS, STEPS, FAULTY_STEP, FAULTY_LAYER = 3, 4, 2, 1
HEADS, HEAD_DIM, ROWS = 4, 8, 16  # rows of a rank


class Fault(RuntimeError):
    """What this rank raises."""


def fail(kind: str) -> None:
    """End this process, or stop it, as `kind` says."""
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
"""Other arguments of one call."""
TENSORS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "another dtype": lambda x: x.double(),
        "another batch": lambda x: x.repeat(2, 1, 1, 1),
    }
)
"""Other tensors in one call."""
ENDINGS = ("raise", "exit 0", "exit 3", "kill", "stop")
SKIPS = ("skip a call", "skip a backward")


class Layers(nn.Module):
    """Attention layers, of which one rank runs one otherwise than the other ranks."""

    def __init__(self, folder: Path, named: bool = True) -> None:
        super().__init__()
        self.named = named
        self.layers = nn.ModuleList(nn.Linear(HEAD_DIM, HEAD_DIM) for _ in range(LAYERS))
        self.folder, self.fault = folder, ""
        self.sp: SequenceParallel | None = None

    def set_sequence_parallel(self, sp: SequenceParallel) -> None:
        """Called by the DeepSpeed door."""
        self.sp = sp

    def forward(self, x: Tensor) -> Tensor:
        """x (1, rows, heads, head_dim) -> the same shape."""
        for index, layer in enumerate(self.layers):
            faulty = self.fault and index == FAULTY_LAYER
            x = x + (self._faulty(layer(x)) if faulty else self._attend(layer(x), index))
        return x

    def _attend(self, x: Tensor, index: int, **words: Any) -> Tensor:
        assert self.sp is not None
        name = f"layers.{index}" if self.named else None
        return self.sp.attention(x, x, x, name=name, **{"causal": True} | words)

    def _faulty(self, x: Tensor) -> Tensor:
        (self.folder / "fault").write_text(str(time.time()))
        if self.fault in ENDINGS:
            fail(self.fault)
        if self.fault == "skip a call":
            return x
        if self.fault == "skip a backward":
            return self._attend(x.detach(), FAULTY_LAYER).detach()
        changed = TENSORS.get(self.fault, lambda x: x)(x)
        return self._attend(changed, FAULTY_LAYER, **CALLS.get(self.fault, {}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["none", *ENDINGS, *SKIPS, *CALLS, *TENSORS])
    parser.add_argument("transport", choices=["gloo", "mpi", "deepspeed"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rank", type=int, default=1, help="that makes the fault")
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--unnamed", action="store_true", help="layers have no names")
    args = parser.parse_args()
    torch.manual_seed(0)
    job = launch.init(timeout=args.timeout, log_folder=args.folder)
    model = Layers(args.folder, not args.unnamed)
    step = OPEN[args.transport](model, job.world_size)
    for number in range(STEPS):
        faulty = number == FAULTY_STEP and job.rank == args.rank
        model.fault = args.kind if faulty and args.kind != "none" else ""
        step(torch.randn(1, ROWS, HEADS, HEAD_DIM))
    print(f"rank {job.rank} is through", flush=True)


def _plain(group: Callable[[], Any]) -> Callable[[Layers, int], Callable[[Tensor], None]]:
    def open_plain(model: Layers, size: int) -> Callable[[Tensor], None]:
        model.sp = SequenceParallel(
            SequenceParallelConfig(sequence_parallel_size=size, route="ring"), group()
        )
        return lambda x: model(x).sum().backward()

    return open_plain


def _deepspeed(model: Layers, size: int) -> Callable[[Tensor], None]:
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


def _mpi_world() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD


OPEN = MappingProxyType(
    {"gloo": _plain(own_group), "mpi": _plain(_mpi_world), "deepspeed": _deepspeed}
)

if __name__ == "__main__":
    main()
