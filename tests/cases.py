"""One attention call on ranks as threads, forward and backward, compared with dense attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.dense import dense_attention, largest
from tests.helpers import run_threads
from tests.sent_bytes import bytes_sent
from wf_backends.comm import Communicator
from wf_backends.kernels import Dropout, Kernel, Scores
from wf_backends.kernels.reference import ReferenceKernel
from wf_backends.lowering.derivation import Problem, lower
from wf_backends.lowering.message_bytes import (
    Shape,
    backward_row_bytes,
    forward_row_bytes,
)
from wf_backends.lowering.program import RankProgram
from wf_backends.runtime.attention import AttentionCall, RouteAttention
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
    team_sizes = [size for size in range(2, n) if n % size**2 == 0]
    return {
        "ring": ring(n),
        "all_gather": all_gather(n),
        **{f"double_ring/{inner}": double_ring(n, inner) for inner in divisors},
        **{f"mesh/{n // cols}x{cols}": mesh(n, n // cols, cols) for cols in [1, *divisors]},
        **{f"concentric/{size}": concentric(n, size) for size in team_sizes},
    }


@dataclass(frozen=True)
class Case:
    """An attention call: schedules, layout, mask, heads, dtype and options of the scores."""

    forward: Schedule
    backward: Schedule
    layout: Layout
    mask: Mask = field(default_factory=Mask)
    queries_walk: bool = False
    """In the backward the queries move and the keys stay; False = the keys move."""
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
    """The forward keeps the rows that it gathers, for the backward."""
    queries_walk_in_forward: bool = False
    host_size: int = 1
    narrow: bool = False
    """Partial results are sent in the dtype of the activations."""
    value_dim: int | None = None
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    bias_reach: int = 0
    """The learned bias by position has a value for each distance up to this; 0 = no bias."""
    dropout_p: float = 0.0

    def options(self) -> dict[str, Any]:
        """Options of `dense_attention` beside mask and scale, the same values at each call."""
        random = torch.Generator().manual_seed(1)
        slopes, sinks = torch.randn(2, self.heads, generator=random, dtype=torch.float64)
        distances = 2 * self.bias_reach + 1
        bias = torch.randn(self.heads, distances, generator=random, dtype=torch.float64)
        return {
            "softcap": self.softcap,
            "alibi_slopes": slopes.abs() if self.alibi else None,
            "sinks": sinks if self.sinks else None,
            "dropout": Dropout(self.dropout_p, 7, (0, self.heads)) if self.dropout_p else None,
            "position_bias": bias if self.bias_reach else None,
        }

    @property
    def num_ranks(self) -> int:
        return self.forward.num_ranks

    def programs(self, rank: int) -> tuple[RankProgram, RankProgram]:
        """(forward, backward) of one rank."""
        layouts = self.layout, self.kv_layout or self.layout
        options = self.keep, self.host_size
        forward = Problem(self.forward, *layouts, self.mask, self.queries_walk_in_forward, *options)
        backward = Problem(self.backward, *layouts, self.mask, self.queries_walk, *options)
        return lower(forward, rank), lower(backward, rank)

    def derived_bytes(self, rank: int) -> dict[str, int]:
        """The bytes that `lowering/message_bytes.py` derives for one rank, by message label."""
        shape = Shape(
            self.batch,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.dtype.itemsize,
            accumulator_size=8 if self.dtype == torch.float64 else 4,
            value_dim=self.value_dim,
            partial_size=self.dtype.itemsize if self.narrow else None,
        )
        forward, backward = self.programs(rank)
        forward_rows = forward_row_bytes(shape, self.queries_walk_in_forward)
        backward_rows = backward_row_bytes(shape, self.queries_walk, self.keep)
        return {
            **bytes_sent(forward, forward_rows, "forward"),
            **bytes_sent(backward, backward_rows, "backward"),
        }

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and dout of the whole sequence, the same values at each call."""
        random = torch.Generator().manual_seed(0)
        num_rows, num_keys = (
            sum(b - a for shard in layout for a, b in shard)
            for layout in (self.layout, self.kv_layout or self.layout)
        )

        def draw(length: int, heads: int, width: int = self.head_dim) -> Tensor:
            shape = (self.batch, length, heads, width)
            return torch.randn(shape, generator=random, dtype=torch.float64).to(self.dtype)

        value_dim = self.value_dim or self.head_dim
        q = draw(num_rows, self.heads) * self.q_scale
        dout = draw(num_rows, self.heads, value_dim)
        k, v = draw(num_keys, self.kv_heads), draw(num_keys, self.kv_heads, value_dim)
        return q, k, v, dout


@dataclass(frozen=True)
class Outcome:
    """Errors of out, dq, dk, dv over all ranks, and the bytes that each rank sent."""

    errors: dict[str, float]
    """The largest absolute error of each."""
    rms: dict[str, float]
    """The root mean square error of each."""
    sent: list[dict[str, int]]

    @property
    def worst(self) -> float:
        return largest(self.errors.values())


def run_case(case: Case) -> Outcome:
    """Run the case on threads and compare with dense attention in float64."""
    q, k, v, dout = case.tensors()
    options = case.options()
    inputs = {"q": q, "k": k, "v": v}
    inputs |= {name: options[name] for name in LEARNED if options[name] is not None}
    results = run_threads(case.num_ranks, _run_rank, case, inputs, dout)
    expected = _run_dense(case, inputs, dout)
    rows = [positions(shard) for shard in case.layout]
    keys = [positions(shard) for shard in case.kv_layout or case.layout]
    errors, rms = {}, {}
    for name, shards in {"out": rows, "dq": rows, "dk": keys, "dv": keys}.items():
        differences = [
            (actual[name].double() - expected[name][:, shard]).flatten()
            for (actual, _), shard in zip(results, shards, strict=True)
        ]
        difference = torch.cat(differences)
        errors[name] = difference.abs().max().item()
        rms[name] = difference.square().mean().sqrt().item()
    for name in [f"d{option}" for option in LEARNED if option in inputs]:
        total = torch.stack([actual[name] for actual, _ in results]).sum(0)
        errors[name] = (total - expected[name]).abs().max().item()
    return Outcome(errors, rms, [sent for _, sent in results])


def _run_rank(
    comm: Communicator, case: Case, inputs: dict[str, Tensor], dout: Tensor
) -> tuple[dict[str, Any], dict[str, int]]:
    """(out and gradients of one rank, the bytes that it sent)."""
    rows = positions(case.layout[comm.rank])
    keys = positions((case.kv_layout or case.layout)[comm.rank])
    shards = {"q": rows, "k": keys, "v": keys}
    leaves = {
        name: _leaf(x[:, shards[name]] if name in shards else x) for name, x in inputs.items()
    }
    options = case.options()
    scores = Scores(case.scale, case.softcap, options["alibi_slopes"], options["dropout"])
    keep = case.forward.gathers() if case.keep else (False, False)
    call = AttentionCall(*case.programs(comm.rank), comm, case.kernel, scores, keep, case.narrow)
    sinks, position_bias = (leaves.get(name) for name in LEARNED)
    qkv = (leaves[name] for name in "qkv")
    out = RouteAttention.apply(*qkv, call, sinks, None, position_bias)
    out.backward(dout[:, rows])
    gradients = {f"d{name}": x.grad for name, x in leaves.items()}
    return {"out": out.detach()} | gradients, dict(comm.sent)


def _run_dense(case: Case, inputs: dict[str, Tensor], dout: Tensor) -> dict[str, Tensor]:
    """Out and gradients of dense attention over the whole sequence, in float64."""
    leaves: dict[str, Any] = {name: _leaf(x.double()) for name, x in inputs.items()}
    out = dense_attention(mask=case.mask, scale=case.scale, **case.options() | leaves)
    gradients = torch.autograd.grad(out, tuple(leaves.values()), dout.double())
    named = {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}
    return {"out": out.detach()} | named


def _leaf(x: Tensor) -> Tensor:
    """A copy that collects a gradient."""
    return x.detach().clone().requires_grad_()


def assert_exact(case: Case, tolerance: float = 1e-10) -> None:
    """Every rank's results are exact, and every rank sent the bytes that lowering derives."""
    outcome = run_case(case)
    assert outcome.worst < tolerance, outcome.errors
    assert outcome.sent == [case.derived_bytes(rank) for rank in range(case.num_ranks)]
