"""One attention call on all ranks as threads, forward and backward, beside the dense one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.dense import dense_attention
from tests.helpers import run_threads
from wf_backends.comm import Communicator
from wf_backends.kernels import Dropout, Kernel, Scores
from wf_backends.kernels.reference import ReferenceKernel
from wf_backends.lowering.derivation import Problem, lower
from wf_backends.lowering.message_bytes import (
    Shape,
    backward_row_bytes,
    bytes_sent,
    forward_row_bytes,
)
from wf_backends.lowering.program import RankProgram
from wf_backends.runtime.attention import Attention, Call
from wf_backends.runtime.shards import positions
from wf_backends.schedule.layout import Layout
from wf_backends.schedule.mask import Mask
from wf_backends.schedule.routes import all_gather, concentric, double_ring, mesh, ring
from wf_backends.schedule.schedule import Schedule

LEARNED = ("sinks", "position_bias")
"""Options with a gradient."""


def schedules(n: int) -> dict[str, Schedule]:
    """Every named schedule for n ranks."""
    divisors = [d for d in range(2, n) if n % d == 0]
    found = {"ring": ring(n), "all_gather": all_gather(n)}
    found |= {f"double_ring/{inner}": double_ring(n, inner) for inner in divisors}
    found |= {f"mesh/{n // cols}x{cols}": mesh(n // cols, cols) for cols in [1, *divisors]}
    teams = [team for team in range(2, n) if n % team**2 == 0]
    return found | {f"concentric/{team}": concentric(n, team) for team in teams}


@dataclass(frozen=True)
class Case:
    """An attention call: who meets whom, which tokens, which mask, which heads."""

    forward: Schedule
    backward: Schedule
    layout: Layout
    mask: Mask = field(default_factory=Mask)
    queries_walk: bool = False
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    batch: int = 1
    scale: float = 0.3
    q_scale: float = 1.0
    kv_layout: Layout | None = None
    dtype: torch.dtype = torch.float64
    kernel: Kernel = field(default_factory=ReferenceKernel)
    keep: bool = False
    """What the forward gathers is kept for the backward."""

    queries_walk_there: bool = False
    """In the forward."""
    host_size: int = 1

    narrow: bool = False
    """Partial results travel in the dtype of the activations."""
    value_dim: int | None = None
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    bias: int = 0
    """Distances of a learned bias to either side, at least; 0 = none."""
    dropout_p: float = 0.0

    def options(self) -> dict[str, Any]:
        """What `dense_attention` is told beside mask and scale; the same for the same case."""
        random = torch.Generator().manual_seed(1)
        slopes, sinks = torch.randn(2, self.heads, generator=random, dtype=torch.float64)
        distances = 2 * self.bias + 1
        bias = torch.randn(self.heads, distances, generator=random, dtype=torch.float64)
        return {
            "softcap": self.softcap,
            "alibi_slopes": slopes.abs() if self.alibi else None,
            "sinks": sinks if self.sinks else None,
            "dropout": Dropout(self.dropout_p, 7, (0, self.heads)) if self.dropout_p else None,
            "position_bias": bias if self.bias else None,
        }

    @property
    def num_ranks(self) -> int:
        return self.forward.num_ranks

    def plans(self, rank: int) -> tuple[RankProgram, RankProgram]:
        """(forward, backward) of one rank."""
        layouts = self.layout, self.kv_layout or self.layout
        told = self.keep, self.host_size
        there = Problem(self.forward, *layouts, self.mask, self.queries_walk_there, *told)
        back = Problem(self.backward, *layouts, self.mask, self.queries_walk, *told)
        return lower(there, rank), lower(back, rank)

    def derived_bytes(self, rank: int) -> dict[str, int]:
        """What `traffic` says that one rank sends."""
        size = 8 if self.dtype == torch.float64 else 4
        partial = self.dtype.itemsize if self.narrow else None
        shape = Shape(
            self.batch,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.dtype.itemsize,
            size,
            self.value_dim,
            partial,
        )
        there, back = self.plans(rank)
        rows = (
            forward_row_bytes(shape, self.queries_walk_there),
            backward_row_bytes(shape, self.queries_walk, self.keep),
        )
        return bytes_sent(there, rows[0], "forward") | bytes_sent(back, rows[1], "backward")

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Whole q, k, v and dout, the same for the same case."""
        random = torch.Generator().manual_seed(0)
        rows, keys = (
            sum(b - a for shard in layout for a, b in shard)
            for layout in (self.layout, self.kv_layout or self.layout)
        )

        def draw(length: int, heads: int, width: int = self.head_dim) -> Tensor:
            shape = (self.batch, length, heads, width)
            return torch.randn(shape, generator=random, dtype=torch.float64).to(self.dtype)

        value_dim = self.value_dim or self.head_dim
        q, dout = draw(rows, self.heads) * self.q_scale, draw(rows, self.heads, value_dim)
        return q, draw(keys, self.kv_heads), draw(keys, self.kv_heads, value_dim), dout


@dataclass(frozen=True)
class Outcome:
    """Errors of out, dq, dk, dv over all ranks, and the bytes that each rank sent."""

    errors: dict[str, float]
    """The worst absolute one."""
    rms: dict[str, float]
    """The root of the mean square."""
    sent: list[dict[str, int]]

    @property
    def worst(self) -> float:
        return max(self.errors.values())


def run_case(case: Case) -> Outcome:
    """Run the case on threads and compare with dense attention in float64."""
    q, k, v, dout = case.tensors()
    options = case.options()
    rows = [positions(shard) for shard in case.layout]
    keys = [positions(shard) for shard in case.kv_layout or case.layout]

    def one_rank(comm: Communicator) -> tuple[list[Tensor], dict[str, int]]:
        r = comm.rank
        mine = [x[:, at[r]].clone().requires_grad_() for x, at in ((q, rows), (k, keys), (v, keys))]
        keep = case.forward.gathers() if case.keep else (False, False)
        scores = Scores(case.scale, case.softcap, options["alibi_slopes"], options["dropout"])
        call = Call(*case.plans(r), comm, case.kernel, scores, keep, case.narrow)
        more = [learned(options[name]) for name in LEARNED]
        out = Attention.apply(*mine, call, more[0], None, more[1])
        out.backward(dout[:, rows[r]])
        parts = [x.grad for x in (*mine, *more) if x is not None]
        return [out.detach(), *parts], dict(comm.sent)

    results = run_threads(case.num_ranks, one_rank)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    more = {name: learned(options[name]) for name in LEARNED if options[name] is not None}
    dense = dense_attention(*wide, case.mask, case.scale, **options | more)
    leaves = (*wide, *more.values())
    right = [dense.detach(), *torch.autograd.grad(dense, leaves, dout.double())]
    errors, rms = {}, {}
    places = {"out": rows, "dq": rows, "dk": keys, "dv": keys}
    for i, (name, at) in enumerate(places.items()):
        found = [(got[i].double() - right[i][:, at[r]]) for r, (got, _) in enumerate(results)]
        flat = torch.cat([x.flatten() for x in found])
        errors[name], rms[name] = flat.abs().max().item(), flat.square().mean().sqrt().item()
    for i, name in enumerate(more, 4):
        parts = torch.stack([got[i] for got, _ in results])
        errors[f"d{name}"] = (parts.sum(0) - right[i]).abs().max().item()
    return Outcome(errors, rms, [sent for _, sent in results])


def learned(x: Tensor | None) -> Tensor | None:
    """A copy that collects a gradient."""
    return None if x is None else x.clone().requires_grad_()


def assert_exact(case: Case, tolerance: float = 1e-10) -> None:
    """The case is exact on every rank, and every rank sent what `traffic` derives."""
    outcome = run_case(case)
    assert outcome.worst < tolerance, outcome.errors
    assert outcome.sent == [case.derived_bytes(rank) for rank in range(case.num_ranks)]
