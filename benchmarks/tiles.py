"""Tiles by size beside the line that the planner's measurement fits to two of them.

    python benchmarks/tiles.py --device cuda --sizes 512,1024,2048,4096,8192,16384

`x line` is measured / what the planner would say for the tile: near 1 where the line holds.
"""

from __future__ import annotations

import argparse

import torch
from measure import cores_and_load, cpu_name

from wf_backends.cluster.measure_kernels import HEAD_DIM, KernelTimer
from wf_backends.cluster.timer import Timer
from wf_backends.comm import World
from wf_backends.lowering import BACKWARD_FLOPS


def main() -> None:
    """Print the rates, and a line per size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--sizes", default="128,256,512,1024", help="separated by commas")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(args.device)
    where = torch.cuda.get_device_name() if args.device == "cuda" else cpu_name()
    timer, kernel = Timer(World(1).comm(0), device), KernelTimer(device)
    rate = kernel.rate(timer.per_run)
    print(f"torch {torch.__version__}, {where}, {cores_and_load()}; kernel {kernel.name}")
    print(f"{kernel.sizes.heads} heads of {HEAD_DIM}, {kernel.dtype}, full tiles. {rate}\n")
    print("| rows and keys | forward | TFLOP/s | x line | backward | TFLOP/s | x line |")
    print("|---|---|---|---|---|---|---|")
    rates = rate.forward_flops_per_s, rate.backward_flops_per_s
    for size in map(int, args.sizes.split(",")):
        cells = [str(size)]
        for work, factor, flops_per_s in zip(
            kernel.tiles(size), (1, BACKWARD_FLOPS), rates, strict=True
        ):
            took = timer.per_run(work, kernel.sizes.row_s)
            flops = factor * size**2 * kernel.flops_per_score
            line = took / (rate.call_s + flops / flops_per_s)
            cells += [f"{1e6 * took:.1f} us", f"{flops / took / 1e12:.3f}", f"{line:.2f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
