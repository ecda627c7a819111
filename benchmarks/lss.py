"""Compare LSS Transformer with Megatron-style sequence parallelism and the ring, for one layer.

    torchrun --nproc-per-node 4 benchmarks/lss.py
    torchrun --nproc-per-node 8 benchmarks/lss.py --tokens 4096

One causal layer (attention and MLP), forward + backward, float32. A unit is the bytes of one
rank's activation. `memory` is how far the process grew over the step at its peak, without weights
and their gradients: of these LSS holds a whole layer on every rank (and averages the gradients
once a step, the line below the table), Megatron 1 / P.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from layers import Attend, Layer, cut_for_megatron, megatron_moves
from measure import Counting, Measured, Scheme, Step, compare, counting_job, machine, measure
from torch import Tensor

from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.dsp import chunk_sizes
from wf_backends.parallel.gradients import GradientMean


def main() -> None:
    """Measure all schemes, and print them beside what is derived."""
    args = parse()
    with counting_job() as comm:
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
    results = compare(comm, schemes, args.repeats)
    unit = args.tokens * args.dim * 4 // comm.size
    layer = Layer(args.dim, args.heads)
    for p in layer.parameters():
        p.grad = torch.zeros_like(p)
    mean = GradientMean(comm)
    (average,) = measure(comm, [lambda: mean(layer.parameters())], args.repeats)
    if comm.rank == 0:
        print(machine(comm))
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

    def rows_and_attention(sp: SequenceParallel) -> tuple[Tensor, Attend]:
        local = sp.shard(whole).requires_grad_()
        return local, lambda q, k, v: sp.attention(q, k, v, causal=causal)

    common = {"sequence_parallel_size": size, "layout": layout, "kernel": "sdpa"}
    lss = SequenceParallel(SequenceParallelConfig.from_dict({**common, "strategy": "lss"}), comm)
    ring = SequenceParallel(SequenceParallelConfig.from_dict({**common, "route": "ring"}), comm)
    alone = SequenceParallel(
        SequenceParallelConfig(kernel="sdpa", layout=layout), comm.view([comm.rank])
    )
    part = cut_for_megatron(layer, comm.rank, size)
    sizes = chunk_sizes(args.tokens, size)
    gather, scatter = megatron_moves(comm, sizes)
    rows = whole.split(sizes, 1)[comm.rank].clone().requires_grad_()

    def megatron(x: Tensor) -> Tensor:
        return part(x, lambda q, k, v: alone.attention(q, k, v, causal=causal), gather, scatter)

    return [
        Scheme("LSS Transformer", step_of(layer, *rows_and_attention(lss)), 4 * (size - 1)),
        Scheme("Ring Attention", step_of(layer, *rows_and_attention(ring)), 6 * (size - 1)),
        Scheme("Megatron-SP", lambda: run(rows, megatron), 8 * (size - 1)),
    ]


def step_of(layer: Layer, x: Tensor, attend: Attend) -> Step:
    return lambda: run(x, lambda x: layer(x, attend))


def run(x: Tensor, layer: Callable[[Tensor], Tensor]) -> float:
    """Forward and backward of a loss in which all tokens have the same weight."""
    loss = layer(x).square().sum()
    loss.backward()
    x.grad = None
    return loss.item()


def show(
    args: argparse.Namespace, size: int, schemes: list[Scheme], results: list[Measured], unit: int
) -> None:
    mask = "full" if args.full else "causal"
    print(f"{args.tokens} tokens, width {args.dim}, {args.heads} heads, {mask}, P = {size}")
    print(f"{'scheme':18}{'collectives':>12}{'units':>8}{'full mask':>11}", end="")
    print(f"{'MB':>8}{'ms':>9}{'memory MB':>11}{'x time':>8}{'x memory':>10}")
    first = results[0]
    for scheme, got in zip(schemes, results, strict=True):
        print(
            f"{scheme.name:18}{got.collectives:12}{got.bytes_sent / unit:8.2f}{scheme.units:11.2f}"
            f"{got.bytes_sent / 1e6:8.2f}{1e3 * got.seconds:9.1f}{got.peak_bytes / 1e6:11.1f}"
            f"{got.seconds / first.seconds:8.2f}{got.peak_bytes / max(1, first.peak_bytes):10.2f}"
        )


if __name__ == "__main__":
    main()
