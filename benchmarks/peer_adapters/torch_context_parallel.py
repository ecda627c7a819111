"""torch's context_parallel: as it is, and its ring with the CPU operator.

As it is, it supports the CUDA operators only. Its ring is a template with the operator as an
argument. Here an autograd.Function of ours calls the template with the CPU operator; the messages
are torch's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from layers import torch_attention
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.distributed.tensor.experimental._context_parallel._load_balancer import (
    _HeadTailLoadBalancer,
)

from peer_adapters import MakeScheme, Scheme, Setup

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def schemes(setup: Setup) -> Mapping[str, MakeScheme]:
    """context_parallel as it is, and its ring with both of its rotate methods."""
    return {
        "context_parallel": partial(unchanged, setup),
        "context_parallel's ring, allgather": partial(ring_on_cpu, setup, "allgather"),
        "context_parallel's ring, alltoall": partial(ring_on_cpu, setup, "alltoall"),
    }


def unchanged(setup: Setup) -> Scheme:
    """In its context, which replaces scaled_dot_product_attention."""
    mesh = init_device_mesh("cpu", (setup.size,))

    @contextmanager
    def context() -> Iterator[None]:
        with context_parallel(mesh, buffers=[torch.arange(setup.tokens)], buffer_seq_dims=[0]):
            yield

    return Scheme(positions(setup), partial(torch_attention, causal=True), context)


def ring_on_cpu(setup: Setup, rotate: str) -> Scheme:
    """Its ring with the CPU operator."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        set_rotate_method(rotate)
        return CpuRing.apply(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    return Scheme(positions(setup), attend)


def positions(setup: Setup) -> Tensor:
    """Positions (s,) of this rank's rows in its head-tail layout."""
    balancer = _HeadTailLoadBalancer(setup.tokens, setup.size, torch.device("cpu"))
    return balancer._generate_indices().flatten().chunk(setup.size)[setup.rank]


class CpuRing(torch.autograd.Function):
    """Causal attention of q, k, v (b, h, s, d) by torch's ring templates."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options = {"is_causal": True, "dropout_p": 0.0, "scale": None}
        group = dist.group.WORLD
        out, lse = ring._templated_ring_attention(group, 2, _FORWARD, q, k, v, **options)  # type: ignore
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        options = {"is_causal": True, "dropout_p": 0.0, "scale": None}
        return ring._templated_ring_attention_backward(
            dist.group.WORLD,
            2,
            _BACKWARD,
            dout,
            "grad_out",
            q,
            k,
            v,
            out,
            lse,
            **options,  # type: ignore
        )
