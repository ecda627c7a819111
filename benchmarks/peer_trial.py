"""One attention call as a measured step: inputs, reference, and the figures of every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from layers import torch_attention
from peer_adapters import Scheme, Setup
from sockets import bytes_sent
from torch import Tensor

T = TypeVar("T")
Step = Callable[[], "tuple[Tensor, ...]"]  # out, dq, dk, dv, this rank's rows


class RefusedError(Exception):
    """A scheme failed on at least one rank; the message is the first such rank's error."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Numbers of query heads and key heads, and head_dim."""

    query: int
    kv: int
    dim: int


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of the whole attention call, the same on every rank.

    q and dout are (1, S, h, d), k and v (1, S, kv heads, d).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    reference: tuple[Tensor, ...]
    """out, dq, dk, dv in float64."""

    @classmethod
    def draw(cls, setup: Setup, heads: Heads, dtype: torch.dtype) -> Inputs:
        """Random inputs, and the reference for them."""
        generator = torch.Generator().manual_seed(0)
        counts = heads.query, heads.kv, heads.kv, heads.query
        shapes = [(1, setup.tokens, count, heads.dim) for count in counts]
        tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        return cls(*tensors, compute_reference(setup, tensors))


@dataclass(frozen=True, slots=True)
class Run:
    """A name, the step to measure, and the scheme's own count of bytes since its last call."""

    name: str
    step: Step
    bytes_reported: Callable[[], int]


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one step; each list has a value per rank.

    cpu: seconds of all threads. wall: seconds. sent: bytes by the kernel's count. reported: bytes
    by the scheme's own count.
    """

    cpu: list[float]
    wall: list[float]
    sent: list[float]
    reported: list[float]


def forward_backward(scheme: Scheme, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Step:
    """A step: attention and its gradients, with new leaves in each call."""

    def step() -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with scheme.context():
            out = scheme.attend(*leaves)
            return out.detach(), *torch.autograd.grad(out, leaves, dout)

    return step


def compute_reference(setup: Setup, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """out, dq, dk, dv of torch's attention in float64; the ranks share out the key heads."""
    q, k, _, _ = inputs
    results = [torch.empty(x.shape, dtype=torch.float64) for x in (q, *inputs[:3])]
    scheme = Scheme(torch.arange(setup.tokens), partial(torch_attention, causal=True))
    for head in range(setup.rank, k.shape[2], setup.size):
        inputs_of_head = (heads_of(x, head, k.shape[2]).double() for x in inputs)
        parts = forward_backward(scheme, *inputs_of_head)()
        for full, part in zip(results, parts, strict=True):
            heads_of(full, head, k.shape[2]).copy_(part)
    for head in range(k.shape[2]):
        for full in results:
            part = heads_of(full, head, k.shape[2]).contiguous()
            dist.broadcast(part, src=head % setup.size)
            heads_of(full, head, k.shape[2]).copy_(part)
    return tuple(results)


def heads_of(x: Tensor, kv_head: int, kv_heads: int) -> Tensor:
    """The heads of x (b, s, h, d) that belong to one key head (GQA)."""
    group_size = x.shape[2] // kv_heads
    return x.narrow(2, kv_head * group_size, group_size)


def make_run(name: str, scheme: Scheme, inputs: Inputs) -> Run:
    """A run of a scheme on this rank's rows."""
    rows = (x[:, scheme.positions] for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    return Run(name, forward_backward(scheme, *rows), scheme.bytes_reported or (lambda: 0))


def one_process(inputs: Inputs, setup: Setup, alone: bool) -> Run:
    """Attention of the whole sequence in one process.

    Args:
        alone: on rank 0 while the others wait; otherwise on every rank at the same time.
    """
    scheme = Scheme(torch.arange(setup.tokens), partial(torch_attention, causal=True))
    step = forward_backward(scheme, inputs.q, inputs.k, inputs.v, inputs.dout)
    if alone and setup.rank != 0:
        return Run("one process, alone", tuple, lambda: 0)
    return Run(f"one process, {'alone' if alone else 'busy'}", step, lambda: 0)


def relative_errors(
    results: Sequence[Tensor], inputs: Inputs, positions: Tensor
) -> tuple[float, ...]:
    """|x - reference| / |reference| of out, dq, dk, dv, Frobenius norms over all ranks.

    Raises:
        ValueError: if the ranks' rows together are not every row of the sequence once.
    """
    rows: list[Tensor] = [torch.empty_like(positions) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, positions.contiguous())
    if not torch.equal(torch.cat(rows).sort().values, torch.arange(inputs.q.shape[1])):
        raise ValueError("the ranks' rows are not the sequence, each row once")
    expected = [x[:, positions] for x in inputs.reference]
    squares = [
        ((x - y).square().sum(), y.square().sum()) for x, y in zip(results, expected, strict=True)
    ]
    sums = torch.tensor(squares, dtype=torch.float64)
    dist.all_reduce(sums)
    return tuple((sums[:, 0] / sums[:, 1]).sqrt().tolist())


def on_all_ranks(function: Callable[[], T]) -> T:
    """Call `function` on every rank; returns its result.

    Raises:
        RefusedError: on every rank, if it failed on any; with the first failed rank's error.
    """
    result, error = None, ""
    try:
        result = function()
    except Exception as raised:
        lines = str(raised).strip().splitlines() or [""]
        error = f"{type(raised).__name__}: {lines[0]}"
    errors: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for error in errors:
        if error:
            raise RefusedError(error)
    return cast(T, result)


def measure(runs: Sequence[Run], repeats: int) -> list[list[Figures]]:
    """The figures of every run, by repeat. Runs take turns; each round starts with another run."""
    figures: list[list[Figures]] = [[] for _ in runs]
    for repeat in range(repeats):
        first = repeat * len(runs) // repeats
        for index in (*range(first, len(runs)), *range(first)):
            figures[index].append(measure_once(runs[index]))
    return figures


def measure_once(run: Run) -> Figures:
    """One step between two barriers; CPU and bytes include those of the communication threads."""
    run.bytes_reported()
    dist.barrier()
    bytes_before = bytes_sent()
    cpu_start = time.process_time()
    wall_start = time.perf_counter()
    run.step()
    wall = time.perf_counter() - wall_start
    dist.barrier()
    cpu = time.process_time() - cpu_start
    values = [cpu, wall, bytes_sent() - bytes_before, run.bytes_reported()]
    return Figures(*gather_by_rank(values))


def gather_by_rank(values: Sequence[float]) -> list[list[float]]:
    """For each value, a list of the values of all ranks."""
    local = torch.tensor(values, dtype=torch.float64)
    rows = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, local)
    return torch.stack(rows, 1).tolist()
