"""An Evoformer block over ranks: memory of a rank, bytes sent and time, forward + backward.

    torchrun --nproc-per-node 4 benchmarks/fold.py

"alone": every rank computes the whole block. "switched": `examples/fold/block_over_ranks.py`, which
cuts channels in the sums over triangles. "gathered": the same sums with the pairs cut along rows
or columns and one factor gathered whole, as in FastFold's dynamic axial parallelism (arXiv
2203.00854, section 4). A unit is the bytes of the pairs of one rank. float32.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import measure
import torch
from measure import Counting, Scheme, Step
from torch import Tensor

from wf_backends.dsp import DynamicSequenceParallel, Sharded

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "fold"))
from block_over_ranks import (
    COLUMNS,
    ROWS,
    SEQUENCES,
    block_over_ranks,
    plus,
    triangle_update,
)
from evoformer import EvoformerBlock, TriangleUpdate

FORMATS = {"scheme": "30", "posts": "9.0f", "units": "8.2f", "ms": "9.1f", "memory MB": "11.1f"}


def main() -> None:
    """Measure the block, then the triangle updates alone."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--residues", type=int, default=192)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with measure.counting_job() as comm:
        torch.manual_seed(0)  # the same on all ranks
        block = EvoformerBlock(fused=True)
        msa = torch.randn(1, args.sequences, args.residues, 256)
        pair = torch.randn(1, args.residues, args.residues, 128)
        blocks = [
            Scheme("block, alone", alone(comm, block, msa, pair), 0),
            Scheme("block, switched", over_ranks(comm, block, msa, pair), 0),
        ]
        triangles = [
            Scheme("triangles, switched", triangles_over_ranks(comm, block, pair, False), 0),
            Scheme("triangles, gathered", triangles_over_ranks(comm, block, pair, True), 0),
        ]
        unit = pair.nbytes / comm.size
        rows: list[list[object]] = []
        for schemes in (blocks, triangles):
            results = measure.compare(comm, schemes, args.repeats)
            for scheme, result in zip(schemes, results, strict=True):
                row = [scheme.name, result.collectives, result.bytes_sent / unit]
                rows.append([*row, 1e3 * result.seconds, result.peak_bytes / 1e6])
        if comm.rank == 0:
            print(measure.machine(comm))
            print(f"{args.sequences} sequences of {args.residues} residues; ", end="")
            print(f"a unit is {unit / 1e6:.2f} MB")
            measure.print_columns(FORMATS, rows)


def alone(comm: Counting, block: EvoformerBlock, msa: Tensor, pair: Tensor) -> Step:
    """The sum over the ranks is that of one."""

    def step() -> float:
        return backward(*block(msa, pair)) / comm.size

    return step


def over_ranks(comm: Counting, block: EvoformerBlock, msa: Tensor, pair: Tensor) -> Step:
    dsp = DynamicSequenceParallel(comm)
    inputs = dsp.split(msa, SEQUENCES), dsp.split(pair, ROWS)

    def step() -> float:
        outputs = block_over_ranks(block, dsp, *inputs)
        return backward(*(out.tensor for out in outputs))

    return step


def triangles_over_ranks(
    comm: Counting, block: EvoformerBlock, pair: Tensor, gathered: bool
) -> Step:
    dsp = DynamicSequenceParallel(comm)
    shard, update = dsp.split(pair, ROWS), with_a_factor_gathered if gathered else triangle_update

    def step() -> float:
        x = plus(shard, update(block.outgoing, dsp, shard))
        x = plus(x, update(block.incoming, dsp, x))
        return backward(x.tensor)

    return step


def with_a_factor_gathered(
    layer: TriangleUpdate, dsp: DynamicSequenceParallel, pair: Sharded
) -> Tensor:
    """(B, n, N, C): a row i takes row i of a ("outgoing") or column i of a, and all of b."""
    x = layer.norm(pair.tensor)
    a, b = (replace(pair, tensor=edges) for edges in layer.edges(x))
    if layer.equation.startswith("bki"):  # sums over the rows of a
        a = dsp.switch(a, ROWS, COLUMNS)
    sums = torch.einsum(layer.equation, a.tensor, dsp.gather_for_shards(b, ROWS))
    return layer.update(x, sums)


def backward(*outputs: Tensor) -> float:
    loss = torch.stack([out.square().sum() for out in outputs]).sum()
    loss.backward()
    return loss.item()


if __name__ == "__main__":
    main()
