"""Compare LSS Transformer with Megatron-style sequence parallelism and the ring, for one layer.

    torchrun --nproc-per-node 4 benchmarks/lss.py
    torchrun --nproc-per-node 8 benchmarks/lss.py --tokens 4096

One causal layer (attention and MLP), forward + backward, float32. A unit is the bytes of one
rank's activation. `memory` is the peak of the process in a step minus its memory before the step,
so it has no weights and gradients. Of these LSS holds a whole layer on every rank, and averages the
gradients once a step (the line below the table); Megatron holds 1 / P of the layer.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import measure
import torch
from layers import Layer, cut_for_megatron, megatron_moves
from measure import Counting, Measured, Scheme, Step

from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.dsp import chunk_sizes
from wf_backends.parallel.gradients import GradientMean

COLUMNS = {"scheme": "18", "collectives": "12.0f", "units": "8.2f", "full mask": "11.2f"}
COLUMNS |= {"MB": "8.2f", "ms": "9.1f", "memory MB": "11.1f", "x time": "8.2f", "x memory": "10.2f"}


def main() -> None:
    """Measure all schemes, and print them beside what is derived."""
    args = parse()
    with measure.counting_job() as comm:
        run_all(args, comm)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048, help="of the whole sequence")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--full", action="store_true", help="no causal mask")
    return parser.parse_args()


def run_all(args: argparse.Namespace, comm: Counting) -> None:
    schemes = make_schemes(args, comm)
    results = measure.compare(comm, schemes, args.repeats)
    unit = args.tokens * args.dim * 4 // comm.size
    layer = Layer(args.dim, args.heads)
    for p in layer.parameters():
        p.grad = torch.zeros_like(p)
    average_gradients = GradientMean(comm)
    (average,) = measure.measure(
        comm, [lambda: average_gradients(layer.parameters())], args.repeats
    )
    if comm.rank == 0:
        print(measure.machine(comm))
        show(args, comm.size, schemes, results, unit)
        print(
            f"averaging the layer's gradients, once a step: {average.bytes_sent / 1e6:.2f} MB, "
            f"{1e3 * average.seconds:.1f} ms; derived "
            f"{2 * (comm.size - 1) / comm.size * 12 * args.dim**2 * 4 / 1e6:.2f} MB"
        )


def make_schemes(args: argparse.Namespace, comm: Counting) -> list[Scheme]:
    """The same layer and the same tokens in every scheme."""
    size, causal = comm.size, not args.full
    layer = Layer(args.dim, args.heads)
    whole = torch.randn(1, args.tokens, args.dim, generator=torch.Generator().manual_seed(1))
    layout = "zigzag" if causal else "contiguous"
    options = {"sequence_parallel_size": size, "layout": layout, "kernel": "sdpa"}

    def sequence_parallel_step(**more_options: str) -> Step:
        config = SequenceParallelConfig.from_dict({**options, **more_options})
        sp = SequenceParallel(config, comm)
        attend = partial(sp.attention, causal=causal)
        return measure.loss_step(sp.shard(whole), lambda x: layer(x, attend))

    def megatron_step() -> Step:
        config = SequenceParallelConfig(kernel="sdpa", layout=layout)
        local_sp = SequenceParallel(config, comm.view([comm.rank]))
        part = cut_for_megatron(layer, comm.rank, size)
        sizes = chunk_sizes(args.tokens, size)
        moves = megatron_moves(comm, sizes)
        attend = partial(local_sp.attention, causal=causal)
        return measure.loss_step(
            whole.split(sizes, 1)[comm.rank], lambda x: part(x, attend, *moves)
        )

    peers = size - 1
    return [
        Scheme("LSS Transformer", sequence_parallel_step(strategy="lss"), 4 * peers),
        Scheme("Ring Attention", sequence_parallel_step(route="ring"), 6 * peers),
        Scheme("Megatron-SP", megatron_step(), 8 * peers),
    ]


def show(
    args: argparse.Namespace, size: int, schemes: list[Scheme], results: list[Measured], unit: int
) -> None:
    mask = "full" if args.full else "causal"
    print(f"{args.tokens} tokens, width {args.dim}, {args.heads} heads, {mask}, P = {size}")
    first = results[0]
    rows: list[list[Any]] = []
    for scheme, result in zip(schemes, results, strict=True):
        row = [scheme.name, result.collectives, result.bytes_sent / unit, scheme.units]
        row += [result.bytes_sent / 1e6, 1e3 * result.seconds, result.peak_bytes / 1e6]
        row += [result.seconds / first.seconds, result.peak_bytes / max(1, first.peak_bytes)]
        rows.append(row)
    measure.print_columns(COLUMNS, rows)


if __name__ == "__main__":
    main()
