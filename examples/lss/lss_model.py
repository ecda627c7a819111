"""A byte-level language model with learned positions; its tokens are sharded over ranks.

Every layer but attention works on the rank's own tokens only. There is dropout outside attention;
it drops the same elements for any number of ranks.

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
    """Dropout of one training step.

    Args:
        p: probability.
        positions: (b, s), of this rank's tokens in the whole sequence.
        seed: of the step.
    """

    p: float
    positions: Tensor
    seed: int

    def __call__(self, x: Tensor, index: int) -> Tensor:
        """Drop elements of x (b, s, d); `index` tells the dropouts of one forward apart."""
        return position_dropout(x, self.positions, self.p, 1000 * self.seed + index)


class Layer(nn.Module):
    """Causal attention and an MLP, each with a residual connection."""

    def __init__(self, config: LanguageModelConfig, sp: SequenceParallel, index: int) -> None:
        super().__init__()
        dim = config.dim
        self.sp, self.heads, self.index = sp, config.heads, index
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, dropout: Dropout) -> Tensor:
        """x (b, s, d) -> (b, s, d)."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        attended = self.sp.attention(q, k, v, causal=True).flatten(2)
        x = x + dropout(self.out(attended), 2 * self.index + 1)
        return x + dropout(self.mlp(self.norms[1](x)), 2 * self.index + 2)


class LanguageModel(nn.Module):
    """A GPT whose output layer shares the weight of the byte embedding."""

    def __init__(self, config: LanguageModelConfig, sp: SequenceParallel) -> None:
        super().__init__()
        self.config = config
        self.byte_embedding = nn.Embedding(VOCABULARY, config.dim)
        self.position_embedding = nn.Embedding(config.seq_len, config.dim)
        self.layers = nn.ModuleList(Layer(config, sp, index) for index in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, ids: Tensor, positions: Tensor, seed: int) -> Tensor:
        """ids, positions (b, s), as shard_batch gives them -> logits (b, s, 256).

        Padding tokens have positions from seq_len on; they get the embedding of the last position.
        """
        p = self.config.dropout if self.training else 0.0
        dropout = Dropout(p, positions, seed)
        positions = positions.clamp(max=self.config.seq_len - 1)
        x = self.byte_embedding(ids) + self.position_embedding(positions)
        x = dropout(x, 0)
        for layer in self.layers:
            x = layer(x, dropout)
        return F.linear(self.norm(x), self.byte_embedding.weight)
