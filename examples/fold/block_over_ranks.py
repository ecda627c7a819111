"""The Evoformer block of `evoformer.py`, over ranks.

Every module needs one dimension whole, and another is sharded there: residues in attention over the
alignment's sequences, channels in the sums over triangles. A switch between them is one all-to-all.
A rank holds 1 / P of all activations but three: the biases of attention (4 or 8 values a pair, of
128), and one factor of the outer product mean.

Shapes: B proteins, S sequences of the alignment (MSA), N residues, C channels; lower case: this
rank's share of it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from evoformer import EvoformerBlock, OuterProductMean, RowAttention, TriangleUpdate
from torch import Tensor

from wf_backends.dsp import DynamicSequenceParallel, Sharded

SEQUENCES, RESIDUES = 1, 2  # dimensions of the MSA
ROWS, COLUMNS, CHANNELS = 1, 2, 3  # dimensions of the pairs


def block_over_ranks(
    block: EvoformerBlock, dsp: DynamicSequenceParallel, msa: Sharded, pair: Sharded
) -> tuple[Sharded, Sharded]:
    """`block(msa, pair)` over the ranks of `dsp`.

    Args:
        msa: cut along its sequences, (B, s, N, C); so is the result.
        pair: cut along its rows, (B, n, N, C of the pairs); so is the result.

    Raises:
        ValueError: for fewer sequences or residues than ranks.
    """
    if not all(msa.sizes + pair.sizes):
        s, n = sum(msa.sizes), sum(pair.sizes)
        raise ValueError(f"{s} sequences and {n} residues on {dsp.size} ranks: each needs one")
    msa = plus(msa, row_attention(block.msa_rows, dsp, msa, pair))
    msa = dsp.switch(msa, SEQUENCES, RESIDUES)
    msa = plus(msa, block.msa_columns(msa.tensor))
    msa = plus(msa, block.msa_transition(msa.tensor))
    pair = plus(pair, outer_product_mean(block.outer, dsp, msa))
    pair = plus(pair, triangle_update(block.outgoing, dsp, pair))
    pair = plus(pair, triangle_update(block.incoming, dsp, pair))
    pair = plus(pair, row_attention(block.starting, dsp, pair, pair))
    columns = transpose(dsp.switch(pair, ROWS, COLUMNS))
    columns = plus(columns, row_attention(block.ending, dsp, columns, columns))
    columns = plus(columns, block.pair_transition(columns.tensor))
    pair = dsp.switch(transpose(columns), COLUMNS, ROWS)
    return dsp.switch(msa, RESIDUES, SEQUENCES), pair


def row_attention(
    layer: RowAttention, dsp: DynamicSequenceParallel, x: Sharded, pair: Sharded
) -> Tensor:
    """Attention within this rank's rows of x; the bias of all pairs comes from all ranks."""
    bias = replace(pair, tensor=layer.pair_bias(pair.tensor))
    return layer.attend(x.tensor, dsp.gather_for_shards(bias, ROWS))


def outer_product_mean(
    layer: OuterProductMean, dsp: DynamicSequenceParallel, msa: Sharded
) -> Tensor:
    """(B, n, N, C of the pairs) from (B, S, n, C): rows of this rank's residues."""
    left, right = layer.factors(msa.tensor)
    return layer.product(left, dsp.gather_for_shards(replace(msa, tensor=right), RESIDUES))


def triangle_update(layer: TriangleUpdate, dsp: DynamicSequenceParallel, pair: Sharded) -> Tensor:
    """The sums over triangles take all pairs, but each channel alone: channels are cut there."""
    x = layer.norm(pair.tensor)
    a, b = (dsp.switch(replace(pair, tensor=edges), ROWS, CHANNELS) for edges in layer.edges(x))
    sums = replace(a, tensor=torch.einsum(layer.equation, a.tensor, b.tensor))
    return layer.update(x, dsp.switch(sums, CHANNELS, ROWS).tensor)


def plus(x: Sharded, y: Tensor) -> Sharded:
    return replace(x, tensor=x.tensor + y)


def transpose(pair: Sharded) -> Sharded:
    """Exchange rows and columns: (B, N, n, C) to (B, n, N, C), or back."""
    return replace(pair, tensor=pair.tensor.transpose(ROWS, COLUMNS), dim=ROWS + COLUMNS - pair.dim)
