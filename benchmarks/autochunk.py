"""AutoChunk on the models of its paper (arXiv 2401.10652): memory, time, and how much longer.

    OMP_NUM_THREADS=1 python benchmarks/autochunk.py > benchmarks/results/autochunk.md

Peaks are bytes of live activations beyond weights and inputs: predicted by the plan, and seen by a
tracker of storages in a real run. Times are of the CPU, in turns, so that other processes on the
machine do not count. On a GPU other sizes, and the real allocator: see autochunk_cuda.py.

    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python benchmarks/autochunk.py --device cuda
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from autochunk_longest import ANY, GPU_HEAD, LONGER, LONGER_HEAD, ON_GPU, gpu_cells, longer_cells
from autochunk_models import (
    CASES,
    MIB,
    Case,
    Made,
    evoformer,
    gpt2,
    made,
    measured_peak,
    mib,
    tensors,
    unet_default,
    vit,
)
from measure import cores_and_load, cpu_name
from torch import nn

from wf_backends.autochunk import BudgetError, autochunk

HEAD = ("model", "attention", "how", "predicted MiB", "measured MiB", "saved")
HEAD += ("predicted slowdown", "measured slowdown", "largest difference", "search s")

# ColossalAI's test forms: a name, the model, budgets in MiB
COLOSSALAI = (
    ("GPT-2, 96 wide, 512 tokens", partial(gpt2, 512, width=96, heads=4), (None, 6, 8)),
    ("ViT-large (2 layers), 384 x 384", partial(vit, 384), (None, 32, 40)),
    ("UNet2D of default width, 64 x 64", partial(unet_default, 64), (None, 150, 300)),
    ("Evoformer, 32 x 64", partial(evoformer, 64), (None, 20, 24)),
)


PARTS = ("models", "budgets", "longest", "gpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each")
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="tables")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    gpu = parser.add_argument_group("with --device cuda")
    gpu.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=["bfloat16", "float32"])
    gpu.add_argument("--tables", nargs="+", default=["models", "capped"])
    gpu.add_argument("--cap", type=float, default=20, help="GB that the second table may take")
    args = parser.parse_args()
    if args.device == "cuda":
        import autochunk_cuda

        return autochunk_cuda.main(args.only, args.dtypes, args.tables, args.cap, row)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {cpu_name()}, one thread; {cores_and_load()} before.")
    if "models" in args.parts:
        table(HEAD)
        for case in (c for c in CASES if args.only in c.name):
            for fused in (False, True):
                rows(case, fused, args.repeats)
    if "budgets" in args.parts:
        print("\nColossalAI's budgets, eager attention:")
        table(HEAD)
        for name, make, budgets in (c for c in COLOSSALAI if args.only in c[0]):
            budget_rows(name, make, budgets)
    if "longest" in args.parts:
        print("\nThe longest sequence within what the unchunked model needs at the first length:")
        table(LONGER_HEAD)
        for case in (c for c in LONGER if args.only in c.name):
            row(*longer_cells(case))
    if "gpu" in args.parts:
        print("\nThe longest sequence within 80 GB, weights and inputs included:")
        table(GPU_HEAD)
        for case in (c for c in ON_GPU if args.only in c.name):
            row(*gpu_cells(case))


def table(head: tuple[str, ...]) -> None:
    print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}")


def row(*cells: object) -> None:
    print(f"| {' | '.join(str(cell) for cell in cells)} |", flush=True)


def rows(case: Case, fused: bool, repeats: int) -> None:
    """The model as it is, chunked to the least memory and to a fifth, and changed by hand."""
    model, kwargs = made(case.make, case.size, fused)
    attention = "fused" if fused else "eager"
    before = measured_peak(model, kwargs)
    unchunked = searched(model, kwargs, None, 0.1)[0].plan.peak_before
    row(case.name, attention, "as it is", mib(unchunked), mib(before), *[""] * 5)
    for how, memory in (("the least", None), ("within a fifth", 0.2)):
        try:
            chunked, search = searched(model, kwargs, memory, 0.1)
        except BudgetError:
            row(case.name, attention, how, "no plan fits", *[""] * 6)
            continue
        predicted = (mib(chunked.plan.peak), f"{chunked.plan.slowdown:+.1%}", f"{search:.1f}")
        report(case.name, attention, how, predicted, model, chunked, kwargs, before, repeats)
    for how, change in case.by_hand.items():
        other, _ = made(case.make, case.size, fused)
        change(other)
        report(case.name, attention, how, ("", "", ""), model, other, kwargs, before, repeats)


def report(
    name: str,
    attention: str,
    how: str,
    predicted: tuple[str, str, str],
    model: nn.Module,
    other: nn.Module,
    kwargs: dict[str, Any],
    before: int,
    repeats: int,
) -> None:
    """A row about `other`, beside the model."""
    peak = measured_peak(other, kwargs)
    row(
        name,
        attention,
        how,
        predicted[0],
        mib(peak),
        f"{1 - peak / before:.0%}",
        predicted[1],
        f"{slowdown(model, other, kwargs, repeats):+.1%}",
        f"{difference(model, other, kwargs):.1g}",
        predicted[2],
    )


def budget_rows(name: str, make: Callable[..., Made], budgets: tuple[int | None, ...]) -> None:
    model, kwargs = made(make, False)
    before = measured_peak(model, kwargs)
    row(name, "eager", "as it is", "", mib(before), *[""] * 5)
    for budget in budgets:
        how = "the least" if budget is None else f"within {budget} MiB"
        try:
            chunked, search = searched(
                model, kwargs, budget and budget * MIB, 0.1 if budget is None else ANY
            )
        except BudgetError:
            row(name, "eager", how, "no plan fits", *[""] * 6)
            continue
        plan = chunked.plan
        predicted = (mib(plan.peak), f"{plan.slowdown:+.1%}", f"{search:.1f}")
        report(name, "eager", how, predicted, model, chunked, kwargs, before, 3)


def searched(
    model: nn.Module, kwargs: dict[str, Any], memory: float | None, most: float
) -> tuple[Any, float]:
    """The chunked model, and the seconds that capture, search and lowering took."""
    start = time.process_time()
    chunked = autochunk(model, (), kwargs, memory, most)
    return chunked, time.process_time() - start


def slowdown(model: nn.Module, other: nn.Module, kwargs: dict[str, Any], repeats: int) -> float:
    """The median of turns: the time that `other` takes more than the model, as a share."""
    turns = [[seconds(x, kwargs) for x in (model, other)] for _ in range(repeats + 1)]
    return median(b / a for a, b in turns[1:]) - 1


def seconds(model: nn.Module, kwargs: dict[str, Any]) -> float:
    with torch.no_grad():
        start = time.process_time()
        model(**kwargs)
        return time.process_time() - start


def difference(model: nn.Module, other: nn.Module, kwargs: dict[str, Any]) -> float:
    """The largest difference of outputs, as a share of the largest value."""
    with torch.no_grad():
        pairs = zip(*(tensors(x(**kwargs)) for x in (other, model)), strict=True)
        return max(float((x - y).abs().max() / y.abs().max()) for x, y in pairs)


if __name__ == "__main__":
    main()
