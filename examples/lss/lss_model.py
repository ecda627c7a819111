"""A byte-level language model with learned positions, its tokens spread over ranks.

Everything but attention works on a rank's own tokens. Dropout stands outside attention, and falls
on the same elements whatever the number of ranks.

Shapes: b batch, s tokens of this rank, d width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from wf_backends import SequenceParallel
from wf_backends.parallel import position_dropout

VOCABULARY = 256


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """Sizes of the model; seq_len is the whole sequence, in bytes."""

    seq_len: int = 1024
    dim: int = 64
    heads: int = 4
    layers: int = 2
    dropout: float = 0.1


@dataclass(frozen=True, slots=True)
class Dropout:
    """The dropout of one step: a new seed at every place where it is asked."""

    p: float
    positions: Tensor
    seed: int

    def __call__(self, x: Tensor, place: int) -> Tensor:
        return position_dropout(x, self.positions, self.p, 1000 * self.seed + place)


class Layer(nn.Module):
    """Causal attention and an MLP, both residual."""

    def __init__(self, config: LanguageModelConfig, sp: SequenceParallel, index: int) -> None:
        super().__init__()
        dim = config.dim
        self.sp, self.heads, self.index = sp, config.heads, index
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, drop: Dropout) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        attended = self.sp.attention(q, k, v, causal=True).flatten(2)
        x = x + drop(self.out(attended), 2 * self.index + 1)
        return x + drop(self.mlp(self.norms[1](x)), 2 * self.index + 2)


class LanguageModel(nn.Module):
    """Logits of the next byte."""

    def __init__(self, config: LanguageModelConfig, sp: SequenceParallel) -> None:
        super().__init__()
        self.config = config
        self.bytes = nn.Embedding(VOCABULARY, config.dim)
        self.places = nn.Embedding(config.seq_len, config.dim)
        self.layers = nn.ModuleList(Layer(config, sp, index) for index in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, ids: Tensor, positions: Tensor, seed: int) -> Tensor:
        """ids, positions (b, s), as shard_batch gives them -> logits (b, s, 256).

        Positions beyond the last one, which only padding has, count as the last.
        """
        drop = Dropout(self.config.dropout if self.training else 0.0, positions, seed)
        x = self.bytes(ids) + self.places(positions.clamp(max=self.config.seq_len - 1))
        x = drop(x, 0)
        for layer in self.layers:
            x = layer(x, drop)
        return F.linear(self.norm(x), self.bytes.weight)
