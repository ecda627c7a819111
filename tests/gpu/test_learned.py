"""Gradients of sinks, learned biases and projections of latents, on ranks that share one GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dense import dense_attention
from tests.gpu.compare import GPU_TOLERANCES
from tests.gpu.ranks_on_gpu import DEVICE, SCHEMES
from tests.helpers import run_threads
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import Communicator
from wf_backends.schedule import make_mask

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(100)]

SEQLEN, HEADS, KV_HEADS, DIM, VALUE_DIM, LATENTS, SHARED = 402, 8, 4, 32, 24, 40, 8
BOUNDS = {torch.float64: 1e-10, torch.float32: GPU_TOLERANCES[torch.float32]}
OPTIONS = ("sinks", "position_bias", "kv_up")


def draw(option: str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    """q, k, v of the whole sequence (latents beside `kv_up`), dout, and the learned tensor."""
    latent = option == "kv_up"
    keys = (1, SEQLEN, 1, SHARED) if latent else (1, SEQLEN, KV_HEADS, DIM)
    values = (1, SEQLEN, 1, LATENTS) if latent else (1, SEQLEN, KV_HEADS, VALUE_DIM)
    learned = {
        "sinks": (HEADS,),
        "position_bias": (HEADS, 2 * 60 - 1),
        "kv_up": (HEADS, DIM - SHARED + VALUE_DIM, LATENTS),
    }[option]
    shapes = (1, SEQLEN, HEADS, DIM), keys, values, (1, SEQLEN, HEADS, VALUE_DIM), learned
    random = torch.Generator().manual_seed(0)
    q, k, v, dout, parameter = (
        torch.randn(shape, generator=random).to(DEVICE, dtype) / 2 for shape in shapes
    )
    return [q, k, v], dout, parameter


def on_ranks(comm: Communicator, option: str, dtype: torch.dtype, config: Any) -> list[Tensor]:
    """out, dq, dk, dv, and the sum of the ranks' parts of the learned tensor's gradient."""
    sp = SequenceParallel(
        SequenceParallelConfig.from_dict({"sequence_parallel_size": comm.size, **config}), comm
    )
    qkv, dout, parameter = draw(option, dtype)
    leaves = [*(sp.shard(x).requires_grad_() for x in qkv), parameter.requires_grad_()]
    arguments: dict[str, Any] = {option: parameter}
    with torch.autograd.set_multithreading_enabled(False):
        out = sp.attention(*leaves[:3], causal=True, **arguments)
        *grads, dlearned = torch.autograd.grad(out, leaves, sp.shard(dout))
    return [*(sp.unshard(x).detach() for x in (out, *grads)), sp.sum_over_ranks(dlearned)]


def dense(option: str, dtype: torch.dtype) -> list[Tensor]:
    """The same in float64, from inputs that are rounded to `dtype`."""
    qkv, dout, parameter = draw(option, dtype)
    leaves = [x.double().requires_grad_() for x in (*qkv, parameter)]
    q, k, v, learned = leaves
    if option == "kv_up":
        both = torch.einsum("bjc,hxc->bjhx", v[:, :, 0], learned)
        k = torch.cat((both[..., : DIM - SHARED], k.expand(-1, -1, HEADS, -1)), -1)
        v = both[..., DIM - SHARED :]
    arguments: dict[str, Any] = {} if option == "kv_up" else {option: learned}
    out = dense_attention(q, k, v, make_mask(causal=True), DIM**-0.5, **arguments)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.double())]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("scheme", ["ring", "concentric", "mesh", "USP"])
@pytest.mark.parametrize("option", OPTIONS)
def test_gradients_are_those_of_dense_attention(
    option: str, scheme: str, dtype: torch.dtype
) -> None:
    expected = dense(option, dtype)
    results = run_threads(4, on_ranks, option, dtype, SCHEMES[4][scheme])[0]
    errors = [
        float((x.double() - y).norm() / y.norm()) for x, y in zip(results, expected, strict=True)
    ]
    names = "out", "dq", "dk", "dv", f"d {option}"
    parts = (f"{name} {error:.2e}" for name, error in zip(names, errors, strict=True))
    print(f"\n{option}, 4 ranks, {scheme}, {dtype}: {', '.join(parts)}", flush=True)
    assert all(error <= BOUNDS[dtype] for error in errors[:-1])
    assert errors[-1] <= 3 * BOUNDS[dtype]  # a sum over all rows, with cancellation
