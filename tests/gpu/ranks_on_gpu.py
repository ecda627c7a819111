"""Attention on ranks that share one GPU, and on one rank: the errors of both against float64.

Ranks are threads or gloo processes, since NCCL takes one rank per GPU.

Shapes: b batch, S global seqlen, h query heads, g key heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.dense import dense_attention
from tests.helpers import run_threads
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import Communicator
from wf_backends.kernels import Dropout
from wf_backends.schedule import make_mask

Options = Mapping[str, Any]
DROPOUT_SEED = 7
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RESULTS = ("out", "dq", "dk", "dv")

SCHEMES: Mapping[int, Mapping[str, Options]] = {
    2: {
        "ring": {"route": "ring"},
        "all-gather": {"route": "all_gather"},
        "Ulysses": {"route": "ring", "ulysses_degree": 2},
    },
    4: {
        "ring": {"route": "ring", "backward_moves": "queries"},
        "double ring": {"route": {"name": "double_ring", "inner": 2}},
        "concentric": {"route": {"name": "concentric", "team_size": 2}},
        "mesh": {"route": {"name": "mesh", "rows": 2, "cols": 2}},
        "all-gather": {"route": "all_gather", "keep_gathered": True},
        "USP": {"route": "ring", "ulysses_degree": 2},
        "hosts of 2": {"route": {"name": "all_gather", "host_size": 2}},
        "LSS": {"strategy": "lss"},
    },
    8: {
        "ring": {"route": "ring"},
        "ring, contiguous": {"route": "ring", "layout": "contiguous"},
        "double ring": {"route": {"name": "double_ring", "inner": 4}},
        "concentric": {"route": {"name": "concentric", "team_size": 2}},
        "mesh": {"route": {"name": "mesh", "rows": 2, "cols": 4}},
        "all-gather": {"route": "all_gather"},
        "Ulysses": {"route": "ring", "ulysses_degree": 8},
        "USP": {"route": "ring", "ulysses_degree": 4},
        "USP in chunks": {"route": "ring", "ulysses_degree": 2, "ulysses_chunks": 2},
        "auto": {"route": "auto", "topology": "one-host"},
    },
}
"""Number of ranks -> name -> fields of the sequence-parallel config."""


def masks(seqlen: int) -> dict[str, Options]:
    """Name -> a mask as arguments of `SequenceParallel.attention`; one of every type."""
    third, half = seqlen // 3, seqlen // 2
    return {
        "full": {},
        "causal": {"causal": True},
        "window": {"causal": True, "window_size": (seqlen // 5, 0)},
        "two-sided window": {"window_size": (seqlen // 7, 30)},
        "documents": {"causal": True, "cu_seqlens": (0, third, third + 1, half + 77, seqlen)},
        "slices": {
            "q_ranges": ((0, half), (half, seqlen)),
            "k_ranges": ((0, half), (0, seqlen)),
            "attn_mask_types": ("full", "causal"),
        },
    }


@dataclass(frozen=True)
class GpuCase:
    """Sizes, mask and options of an attention call."""

    seqlen: int
    mask: str
    dtype: torch.dtype = torch.bfloat16
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    batch: int = 1
    kernel: str = "auto"
    dropout_p: float = 0.0
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    bias: bool = False

    def options(self) -> dict[str, Any]:
        """Arguments of `SequenceParallel.attention` beside tensors and mask."""
        options: dict[str, Any] = {}
        if self.dropout_p:
            options |= {"dropout_p": self.dropout_p, "dropout_seed": DROPOUT_SEED}
        if self.softcap:
            options["softcap"] = self.softcap
        if self.alibi:
            options["alibi_slopes"] = 2.0 ** -torch.arange(1.0, self.heads + 1).to(DEVICE)
        if self.sinks:
            options["sinks"] = torch.linspace(-1, 2, self.heads, device=DEVICE)
        if self.bias:
            distances = torch.linspace(-9, 9, 2 * 300 - 1, device=DEVICE)
            options["position_bias"] = torch.linspace(1, 3, self.heads, device=DEVICE).outer(
                distances.sin()
            )
        return options

    def reference_options(self) -> dict[str, Any]:
        """The same as arguments of `dense_attention`."""
        options = self.options()
        if self.dropout_p:
            del options["dropout_p"], options["dropout_seed"]
            options["dropout"] = Dropout(self.dropout_p, DROPOUT_SEED, (0, self.heads))
        return options

    def tensors(self) -> list[Tensor]:
        """q, k, v and dout of the whole sequence (b, S, h or g, d), the same on every rank."""
        random = torch.Generator().manual_seed(0)
        head_counts = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(self.batch, self.seqlen, heads, self.head_dim) for heads in head_counts]
        tensors = (torch.randn(shape, generator=random) for shape in shapes)
        return [x.to(DEVICE, self.dtype) for x in tensors]


def attend(comm: Communicator, scheme: Options, case: GpuCase) -> list[Tensor]:
    """Out, dq, dk and dv of the whole sequence."""
    config = {"sequence_parallel_size": comm.size, "kernel": case.kernel, **scheme}
    sp = SequenceParallel(SequenceParallelConfig.from_dict(config), comm)
    mask = masks(case.seqlen)[case.mask]
    # Layouts follow from these arguments of a mask.
    layout = {key: x for key, x in mask.items() if key not in ("causal", "window_size")}
    *qkv, dout = (sp.shard(x, **layout) for x in case.tensors())
    leaves = [x.requires_grad_() for x in qkv]
    # Threads that wait for each other in a backward must not share autograd's thread of the GPU.
    with torch.autograd.set_multithreading_enabled(False):
        out = sp.attention(*leaves, **mask, **case.options())
        grads = torch.autograd.grad(out, leaves, dout)
    return [sp.unshard(x, **layout).detach() for x in (out, *grads)]


def attend_alone(comm: Communicator, case: GpuCase) -> list[Tensor]:
    """The same on one rank."""
    return attend(comm, {"route": "ring", "layout": "contiguous"}, case)


@cache
def reference(case: GpuCase) -> list[Tensor]:
    """Out, dq, dk and dv of dense attention in float64."""
    *qkv, dout = (x.double() for x in case.tensors())
    leaves = [x.requires_grad_() for x in qkv]
    mask = make_mask(**masks(case.seqlen)[case.mask], seqlen=case.seqlen)
    out = dense_attention(*leaves, mask, case.head_dim**-0.5, **case.reference_options())
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def relative_errors(results: list[Tensor], case: GpuCase) -> list[float]:
    """Those of out, dq, dk and dv: |x - expected| / |expected|."""
    pairs = zip(results, reference(case), strict=True)
    return [float((x.double() - y).norm() / y.norm()) for x, y in pairs]


@cache
def one_rank_errors(case: GpuCase) -> list[float]:
    """The errors of one rank with the same kernel."""
    return relative_errors(run_threads(1, attend_alone, case)[0], case)


def describe(name: str, case: GpuCase, errors: list[float], expected: list[float]) -> str:
    """A line to print: the errors of several ranks and, in brackets, those of one."""
    parts = (
        f"{result} {error:.2e} ({one_rank:.2e})"
        for result, error, one_rank in zip(RESULTS, errors, expected, strict=True)
    )
    return f"{name}, {case.mask}, {case.dtype}, {case.kernel}: {', '.join(parts)}"
