"""One attention call as a measured step: the inputs, the reference, the figures of every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from layers import torch_attention
from peer_adapters import Place, Scheme
from sockets import bytes_sent
from torch import Tensor

T = TypeVar("T")
Step = Callable[[], "tuple[Tensor, ...]"]  # out, dq, dk, dv, this rank's rows


class RefusedError(Exception):
    """A scheme does not run, on any rank; the error of the first rank on which it failed."""


@dataclass(frozen=True, slots=True)
class Heads:
    """How many there are of each, and their size."""

    of_queries: int
    of_keys: int
    size: int


@dataclass(frozen=True, slots=True)
class Work:
    """The whole call, the same on every rank; all tensors (1, S, h, d), k and v of kv heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    reference: tuple[Tensor, ...]
    """out, dq, dk, dv in float64."""

    @classmethod
    def draw(cls, place: Place, heads: Heads, dtype: torch.dtype) -> Work:
        random, keys = torch.Generator().manual_seed(0), heads.of_keys
        counts = heads.of_queries, keys, keys, heads.of_queries
        shapes = [(1, place.tokens, count, heads.size) for count in counts]
        inputs = [torch.randn(shape, generator=random).to(dtype) for shape in shapes]
        return cls(*inputs, reference_of(place, inputs))


@dataclass(frozen=True, slots=True)
class Run:
    """A name, what is measured, and the scheme's own count of bytes since it was last asked."""

    name: str
    step: Step
    reported: Callable[[], int]


@dataclass(frozen=True, slots=True)
class Figures:
    """One step on every rank: seconds of CPU (all threads), of wall clock; bytes, counted twice."""

    cpu: list[float]
    wall: list[float]
    sent: list[float]
    reported: list[float]


def forward_backward(scheme: Scheme, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Step:
    """Attention and its gradients; fresh leaves each time, so that nothing is kept."""

    def step() -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with scheme.around():
            out = scheme.attend(*leaves)
            return out.detach(), *torch.autograd.grad(out, leaves, dout)

    return step


def reference_of(place: Place, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """out, dq, dk, dv of torch's attention in float64; each rank computes some of the key heads."""
    q, k, _, _ = inputs
    whole = [torch.empty(x.shape, dtype=torch.float64) for x in (q, *inputs[:3])]
    scheme = Scheme(torch.arange(place.tokens), partial(torch_attention, causal=True))
    for head in range(place.rank, k.shape[2], place.size):
        mine = (heads_of(x, head, k.shape[2]).double() for x in inputs)
        parts = forward_backward(scheme, *mine)()
        for full, part in zip(whole, parts, strict=True):
            heads_of(full, head, k.shape[2]).copy_(part)
    for head in range(k.shape[2]):
        for full in whole:
            part = heads_of(full, head, k.shape[2]).contiguous()
            dist.broadcast(part, src=head % place.size)
            heads_of(full, head, k.shape[2]).copy_(part)
    return tuple(whole)


def heads_of(x: Tensor, kv_head: int, kv_heads: int) -> Tensor:
    """The heads of (b, s, h, d) that belong to one key head."""
    each = x.shape[2] // kv_heads
    return x.narrow(2, kv_head * each, each)


def run_of(name: str, scheme: Scheme, work: Work) -> Run:
    """A scheme on this rank's rows of the work."""
    parts = (x[:, scheme.positions] for x in (work.q, work.k, work.v, work.dout))
    return Run(name, forward_backward(scheme, *parts), scheme.reported or (lambda: 0))


def one_process(work: Work, place: Place, alone: bool) -> Run:
    """The whole sequence in one process: on rank 0 while the others wait, or on every rank."""
    scheme = Scheme(torch.arange(place.tokens), partial(torch_attention, causal=True))
    step = forward_backward(scheme, work.q, work.k, work.v, work.dout)
    if alone and place.rank:
        return Run("one process, alone", tuple, lambda: 0)
    return Run(f"one process, {'alone' if alone else 'busy'}", step, lambda: 0)


def errors_of(found: Sequence[Tensor], work: Work, positions: Tensor) -> tuple[float, ...]:
    """|x - reference| / |reference| of out, dq, dk, dv, Frobenius norms over all ranks.

    Raises:
        ValueError: if the ranks' rows are not all rows once.
    """
    rows: list[Tensor] = [torch.empty_like(positions) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, positions.contiguous())
    if not torch.equal(torch.cat(rows).sort().values, torch.arange(work.q.shape[1])):
        raise ValueError("the ranks' rows are not the sequence, each row once")
    right = [x[:, positions] for x in work.reference]
    squares = [
        ((x - y).square().sum(), y.square().sum()) for x, y in zip(found, right, strict=True)
    ]
    sums = torch.tensor(squares, dtype=torch.float64)
    dist.all_reduce(sums)
    return tuple((sums[:, 0] / sums[:, 1]).sqrt().tolist())


def agree(work: Callable[[], T]) -> T:
    """What `work` returns.

    Raises:
        RefusedError: on every rank, if it failed on any; what the first of them says.
    """
    result, error = None, ""
    try:
        result = work()
    except Exception as raised:
        first = str(raised).strip().splitlines() or [""]
        error = f"{type(raised).__name__}: {first[0]}"
    errors: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    failed = next(filter(None, errors), "")
    if failed:
        raise RefusedError(failed)
    return cast(T, result)


def measure(runs: Sequence[Run], repeats: int) -> list[list[Figures]]:
    """Every run's figures, repeat by repeat; runs take turns, each round begins with another."""
    found: list[list[Figures]] = [[] for _ in runs]
    for repeat in range(repeats):
        first = repeat * len(runs) // repeats
        for index in (*range(first, len(runs)), *range(first)):
            found[index].append(measure_once(runs[index]))
    return found


def measure_once(run: Run) -> Figures:
    """One step, from a barrier to the next; CPU and bytes include what threads do for others."""
    run.reported()
    dist.barrier()
    sent, cpu, wall = bytes_sent(), time.process_time(), time.perf_counter()
    run.step()
    seconds = time.perf_counter() - wall
    dist.barrier()
    values = [time.process_time() - cpu, seconds, bytes_sent() - sent, run.reported()]
    return Figures(*everyone(values))


def everyone(values: Sequence[float]) -> list[list[float]]:
    """For each value those of all ranks."""
    own = torch.tensor(values, dtype=torch.float64)
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own)
    return torch.stack(rows, 1).tolist()
