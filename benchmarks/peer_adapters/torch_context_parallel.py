"""torch's context_parallel: as shipped, and its ring around the operator for CPUs.

As shipped it knows the CUDA operators only. Its ring is a template that takes the operator as an
argument; it is handed the CPU's here, in an autograd.Function of ours, and moves its own messages.
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

from peer_adapters import Make, Place, Scheme

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def schemes(place: Place) -> Mapping[str, Make]:
    """As shipped, and both ways in which its ring turns."""
    return {
        "context_parallel": partial(as_shipped, place),
        "context_parallel's ring, allgather": partial(around_cpu, place, "allgather"),
        "context_parallel's ring, alltoall": partial(around_cpu, place, "alltoall"),
    }


def as_shipped(place: Place) -> Scheme:
    """The context that replaces scaled_dot_product_attention."""
    mesh = init_device_mesh("cpu", (place.size,))

    @contextmanager
    def around() -> Iterator[None]:
        with context_parallel(mesh, buffers=[torch.arange(place.tokens)], buffer_seq_dims=[0]):
            yield

    return Scheme(positions(place), partial(torch_attention, causal=True), around)


def around_cpu(place: Place, rotate: str) -> Scheme:
    """Its ring with the operator for CPUs."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        set_rotate_method(rotate)
        return CpuRing.apply(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    return Scheme(positions(place), attend)


def positions(place: Place) -> Tensor:
    """(s,) positions of its head-tail layout."""
    order = _HeadTailLoadBalancer(place.tokens, place.size, torch.device("cpu"))
    return order._generate_indices().flatten().chunk(place.size)[place.rank]


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
