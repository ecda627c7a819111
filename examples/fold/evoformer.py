"""One Evoformer block of AlphaFold 2 (Jumper et al. 2021, supplement 1.6, algorithms 6 to 15).

The block takes most of the memory of a protein model: its pair representation is quadratic in the
number of residues, and the scores of its triangle attention are cubic.

Shapes: B proteins, S sequences of the alignment (MSA), N residues, C channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GatedAttention(nn.Module):
    """Attention along the second to last dimension, with a gate and an optional bias.

    Args:
        fused: call torch's scaled_dot_product_attention; otherwise scores are materialized.
    """

    def __init__(self, channels: int, heads: int, width: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.width, self.fused = heads, width, fused
        self.q, self.k, self.v = (nn.Linear(channels, heads * width, bias=False) for _ in range(3))
        self.gate = nn.Linear(channels, heads * width)
        self.out = nn.Linear(heads * width, channels)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: (B, rows, N, C), out: the same; bias: (B, 1, heads, N, N), the same for all rows."""
        q, k, v = (self._split(project(x)) for project in (self.q, self.k, self.v))
        if self.fused:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            scores = torch.matmul(q * self.width**-0.5, k.transpose(-1, -2))
            if bias is not None:
                scores = scores + bias
            out = torch.matmul(scores.softmax(-1), v)
        out = out.transpose(-2, -3).flatten(-2)
        return self.out(torch.sigmoid(self.gate(x)) * out)

    def _split(self, x: Tensor) -> Tensor:
        """(B, rows, N, heads * width) to (B, rows, heads, N, width)."""
        return x.unflatten(-1, (self.heads, self.width)).transpose(-2, -3)


class RowAttention(nn.Module):
    """Attention within each row of x, with a bias from the pair representation.

    With x = the MSA it is algorithm 7; with x = the pairs it is algorithm 13 (triangle attention
    around the starting node).
    """

    def __init__(self, channels: int, pair: int, heads: int, width: int, fused: bool) -> None:
        super().__init__()
        self.norm, self.pair_norm = nn.LayerNorm(channels), nn.LayerNorm(pair)
        self.bias = nn.Linear(pair, heads, bias=False)
        self.attention = GatedAttention(channels, heads, width, fused)

    def forward(self, x: Tensor, pair: Tensor) -> Tensor:
        """x: (B, rows, N, C), out: the same; pair: (B, N, N, C of the pairs)."""
        return self.attend(x, self.pair_bias(pair))

    def pair_bias(self, pair: Tensor) -> Tensor:
        """(B, N, N, heads) from (B, N, N, C of the pairs)."""
        return self.bias(self.pair_norm(pair))

    def attend(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.attention(self.norm(x), bias.permute(0, 3, 1, 2).unsqueeze(1))


class ColumnAttention(nn.Module):
    """Attention over the sequences of the MSA, for each residue (algorithm 8)."""

    def __init__(self, channels: int, heads: int, width: int, fused: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.attention = GatedAttention(channels, heads, width, fused)

    def forward(self, msa: Tensor) -> Tensor:
        """msa: (B, S, N, C), out: the same."""
        return self.attention(self.norm(msa.transpose(1, 2))).transpose(1, 2)


class Transition(nn.Module):
    """Two linears with a hidden layer of 4 times the width (algorithms 9 and 15)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.up, self.down = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(self.norm(x))))


class OuterProductMean(nn.Module):
    """Mean over the MSA's sequences of the outer products of residues (algorithm 10)."""

    def __init__(self, msa: int, pair: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(msa)
        self.left, self.right = nn.Linear(msa, hidden), nn.Linear(msa, hidden)
        self.out = nn.Linear(hidden * hidden, pair)

    def forward(self, msa: Tensor) -> Tensor:
        """(B, S, N, C) to (B, N, N, C of the pairs)."""
        return self.product(*self.factors(msa))

    def factors(self, msa: Tensor) -> tuple[Tensor, Tensor]:
        """Of rows and of columns of the pairs, (B, S, N, hidden) each."""
        x = self.norm(msa)
        return self.left(x), self.right(x)

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        outer = torch.einsum("bsic,bsjd->bijcd", left, right)
        return self.out(outer.flatten(-2) / left.shape[1])


class TriangleUpdate(nn.Module):
    """Update each edge ij from the other two edges of all triangles ijk (algorithms 11 and 12).

    out_ij = sum_k a_ik b_jk ("outgoing" edges), or sum_k a_ki b_kj.
    """

    def __init__(self, channels: int, hidden: int, outgoing: bool) -> None:
        super().__init__()
        self.equation = "bikc,bjkc->bijc" if outgoing else "bkic,bkjc->bijc"
        self.norm, self.out_norm = nn.LayerNorm(channels), nn.LayerNorm(hidden)
        self.a, self.b, self.a_gate, self.b_gate = (nn.Linear(channels, hidden) for _ in range(4))
        self.out, self.gate = nn.Linear(hidden, channels), nn.Linear(channels, channels)

    def forward(self, pair: Tensor) -> Tensor:
        """pair: (B, N, N, C), out: the same."""
        x = self.norm(pair)
        return self.update(x, torch.einsum(self.equation, *self.edges(x)))

    def edges(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """a and b, (B, N, N, hidden) each, from the normed pairs."""
        a = torch.sigmoid(self.a_gate(x)) * self.a(x)
        return a, torch.sigmoid(self.b_gate(x)) * self.b(x)

    def update(self, x: Tensor, sums: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(x)) * self.out(self.out_norm(sums))


class EvoformerBlock(nn.Module):
    """Algorithm 6, without dropout. `fused`: see `GatedAttention`."""

    def __init__(
        self,
        msa: int = 256,
        pair: int = 128,
        heads: int = 8,
        pair_heads: int = 4,
        width: int = 32,
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.msa_rows = RowAttention(msa, pair, heads, width, fused)
        self.msa_columns = ColumnAttention(msa, heads, width, fused)
        self.msa_transition = Transition(msa)
        self.outer = OuterProductMean(msa, pair, width)
        self.outgoing = TriangleUpdate(pair, pair, outgoing=True)
        self.incoming = TriangleUpdate(pair, pair, outgoing=False)
        self.starting = RowAttention(pair, pair, pair_heads, width, fused)
        self.ending = RowAttention(pair, pair, pair_heads, width, fused)
        self.pair_transition = Transition(pair)

    def forward(self, msa: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
        """msa: (B, S, N, C); pair: (B, N, N, C of the pairs); out: the same two."""
        msa = msa + self.msa_rows(msa, pair)
        msa = msa + self.msa_columns(msa)
        msa = msa + self.msa_transition(msa)
        pair = pair + self.outer(msa)
        pair = pair + self.outgoing(pair)
        pair = pair + self.incoming(pair)
        pair = pair + self.starting(pair, pair)
        columns = pair.transpose(1, 2)  # triangle attention around the ending node (algorithm 14)
        pair = pair + self.ending(columns, columns).transpose(1, 2)
        return msa, pair + self.pair_transition(pair)
