"""Attention on ranks of one GPU beside one process, and how far both are from float64.

Ranks are threads or gloo processes that share the GPU: NCCL takes one rank a GPU.

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

Words = Mapping[str, Any]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("out", "dq", "dk", "dv")

SCHEMES: Mapping[int, Mapping[str, Words]] = {
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
"""By number of ranks and name, as configurations."""


def masks(seqlen: int) -> dict[str, Words]:
    """Every kind of mask, by name, as `SequenceParallel.attention` takes it."""
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
class OnGpu:
    """What is attended to, and with which options of `SequenceParallel.attention`."""

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

    def options(self) -> dict[str, Any]:
        """Beside the mask; slopes and sinks of the heads."""
        found: dict[str, Any] = {}
        if self.dropout_p:
            found |= {"dropout_p": self.dropout_p, "dropout_seed": 7}
        if self.softcap:
            found["softcap"] = self.softcap
        if self.alibi:
            found["alibi_slopes"] = 2.0 ** -torch.arange(1.0, self.heads + 1).to(DEVICE)
        if self.sinks:
            found["sinks"] = torch.linspace(-1, 2, self.heads, device=DEVICE)
        return found

    def tensors(self) -> list[Tensor]:
        """Whole q, k, v and dout (b, S, h or g, d), the same wherever they are drawn."""
        random = torch.Generator().manual_seed(0)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(self.batch, self.seqlen, n, self.head_dim) for n in heads]
        drawn = (torch.randn(shape, generator=random) for shape in shapes)
        return [x.to(DEVICE, self.dtype) for x in drawn]


def attend(comm: Communicator, words: Words, case: OnGpu) -> list[Tensor]:
    """Whole out, dq, dk and dv, as this rank puts them together."""
    words = {"sequence_parallel_size": comm.size, "kernel": case.kernel, **words}
    sp = SequenceParallel(SequenceParallelConfig.from_dict(words), comm)
    mask = masks(case.seqlen)[case.mask]
    by = {name: x for name, x in mask.items() if name not in ("causal", "window_size")}
    *qkv, dout = (sp.shard(x, **by) for x in case.tensors())
    local = [x.requires_grad_() for x in qkv]
    # Threads that wait for each other in a backward may not share autograd's thread of the GPU.
    with torch.autograd.set_multithreading_enabled(False):
        out = sp.attention(*local, **mask, **case.options())
        grads = torch.autograd.grad(out, local, dout)
    return [sp.unshard(x, **by).detach() for x in (out, *grads)]


def attend_alone(comm: Communicator, case: OnGpu) -> list[Tensor]:
    """The same by one rank."""
    return attend(comm, {"route": "ring", "layout": "contiguous"}, case)


@cache
def right(case: OnGpu) -> list[Tensor]:
    """Out, dq, dk and dv by one dense softmax in float64."""
    *qkv, dout = (x.double() for x in case.tensors())
    leaves = [x.requires_grad_() for x in qkv]
    options = {name: x for name, x in case.options().items() if not name.startswith("dropout")}
    if case.dropout_p:
        options["dropout"] = Dropout(case.dropout_p, 7, (0, case.heads))
    mask = make_mask(**masks(case.seqlen)[case.mask], seqlen=case.seqlen)
    out = dense_attention(*leaves, mask, case.head_dim**-0.5, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def errors(found: list[Tensor], case: OnGpu) -> list[float]:
    """Of out, dq, dk and dv: |found - right| / |right|."""
    pairs = zip(found, right(case), strict=True)
    return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]


@cache
def alone(case: OnGpu) -> list[float]:
    """The errors of one rank with the same kernel: the yardstick."""
    return errors(run_threads(1, attend_alone, case)[0], case)


def line(name: str, case: OnGpu, many: list[float], one: list[float]) -> str:
    """Errors of several ranks and of one, for people."""
    told = (f"{n} {a:.2e} ({b:.2e})" for n, a, b in zip(NAMES, many, one, strict=True))
    return f"{name}, {case.mask}, {case.dtype}, {case.kernel}: {', '.join(told)}"
