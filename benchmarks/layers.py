"""One transformer layer, on one device and in Megatron's sequence parallelism, for comparisons.

Megatron's layer (arXiv 2205.05198) splits heads and MLP over the ranks: an all-gather of tokens
before attention and MLP, and a reduce-scatter of partial results after them.

Shapes: B batch, n tokens and h heads (of this rank, or all), D width, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wf_backends.comm import Communicator, all_to_all
from wf_backends.dsp import Sizes
from wf_backends.runtime import linear_map

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v (B, n, h, d) -> (B, n, h, d)
Move = Callable[[Tensor], Tensor]


def torch_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """torch's attention of q, k, v (B, n, h, d) -> (B, n, h, d); k and v may have fewer heads."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    return out.transpose(1, 2)


class Layer(nn.Module):
    """Attention and MLP, each with a residual connection; x is (B, n, D)."""

    def __init__(self, dim: int, heads: int, seed: int = 0) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.norms = nn.ModuleList(nn.LayerNorm(dim, elementwise_affine=False) for _ in range(2))
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator) / dim**0.5)

        self.qkv, self.out = draw(3, dim, dim), draw(dim, dim)
        self.up, self.down = draw(4 * dim, dim), draw(dim, 4 * dim)

    def forward(
        self, x: Tensor, attend: Attend, gather: Move = lambda x: x, scatter: Move = lambda x: x
    ) -> Tensor:
        """x (B, n, D), out: the same; `gather` before attention and MLP, `scatter` after them."""
        y = gather(self.norms[0](x))
        q, k, v = (F.linear(y, w).unflatten(-1, (-1, self.head_dim)) for w in self.qkv)
        x = x + scatter(F.linear(attend(q, k, v).flatten(2), self.out))
        y = F.gelu(F.linear(gather(self.norms[1](x)), self.up))
        return x + scatter(F.linear(y, self.down))


def cut_for_megatron(layer: Layer, rank: int, size: int) -> Layer:
    """The layer of one rank in Megatron's scheme: 1 / size of the heads and of the MLP.

    Raises:
        ValueError: if size does not divide the heads.
    """
    if layer.heads % size:
        raise ValueError(f"the {size} ranks must divide the {layer.heads} heads")
    part = Layer(layer.qkv.shape[1], layer.heads)
    for name, dim in (("qkv", 1), ("out", 1), ("up", 0), ("down", 1)):
        weight = getattr(layer, name).detach().chunk(size, dim)[rank].clone()
        setattr(part, name, nn.Parameter(weight))
    return part


def megatron_moves(comm: Communicator, sizes: Sizes) -> tuple[Move, Move]:
    """(all-gather, reduce-scatter) of tokens along dim 1; each is the backward of the other."""
    gather, scatter = (partial(f, comm, sizes) for f in (_gather, _reduce_scatter))

    def gather_tokens(x: Tensor) -> Tensor:
        return linear_map(x, gather, scatter, "megatron gather")

    def scatter_tokens(x: Tensor) -> Tensor:
        return linear_map(x, scatter, gather, "megatron scatter")

    return gather_tokens, scatter_tokens


def _gather(comm: Communicator, sizes: Sizes, x: Tensor, label: str) -> Tensor:
    shapes = [torch.Size((x.shape[0], size, x.shape[2])) for size in sizes]
    return torch.cat(all_to_all(comm, label, [x] * comm.size, shapes), 1)


def _reduce_scatter(comm: Communicator, sizes: Sizes, x: Tensor, label: str) -> Tensor:
    parts = x.split(sizes, 1)
    return torch.stack(all_to_all(comm, label, parts, [parts[comm.rank].shape] * comm.size)).sum(0)
