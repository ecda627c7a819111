"""AutoChunk on the models of its paper (arXiv 2401.10652): memory, time, and how much longer.

    OMP_NUM_THREADS=1 python benchmarks/autochunk.py > benchmarks/results/autochunk.md
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python benchmarks/autochunk.py --device cuda

Peaks are bytes of live activations beyond weights and inputs: predicted by the plan, and seen in a
real run. On a CPU they are seen by a tracker of storages, and times are of the CPU, in turns, so
that other processes on the machine do not count. A GPU has other sizes, torch's allocator, events,
and the longest lengths run within a cap.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from autochunk_longest import (
    ANY,
    CAP_HEAD,
    CAPPED,
    GPU_HEAD,
    LONGER,
    LONGER_HEAD,
    ON_GPU,
    capped_rows,
    gpu_cells,
    longer_cells,
)
from autochunk_models import (
    MIB,
    WIDE,
    Made,
    chunk_layers,
    device_peak,
    evoformer,
    gpt2,
    llama,
    made,
    measured_peak,
    mib,
    tensors,
    tile_mlps,
    unet,
    unet_condition,
    unet_default,
    vit,
)
from measure import attempt, cores_and_load, cpu_name
from torch import nn

from wf_backends.autochunk import BudgetError, autochunk
from wf_backends.autochunk.cost import measure_rates
from wf_backends.graph import unchunked_peak

HEAD = ("model", "attention", "how", "predicted MiB", "measured MiB", "saved")
HEAD += ("predicted slowdown", "measured slowdown", "largest difference", "search s")
SHARES = {"the least": None, "within a fifth": 0.2}
PARTS = {"cpu": ("models", "budgets", "longest", "gpu"), "cuda": ("models", "capped")}


@dataclass(frozen=True)
class Case:
    """A model at a size: `make(size, fused)`. `by_hand` changes a model as people do by hand.

    Budgets by name: bytes at any slowdown, or a share of the peak at most 10 % slower.
    """

    name: str
    size: int
    make: Callable[[int, bool], Made]
    by_hand: Mapping[str, Callable[[nn.Module], None]] = field(default_factory=dict)
    budgets: Mapping[str, float | None] = field(default_factory=SHARES.copy)


MLPS = {"MLPs in 8 tiles by hand": tile_mlps}
LAYERS = {"chunk_layer by hand": chunk_layers}
CASES = (
    Case("GPT-2, 2,048 tokens", 2048, gpt2, MLPS),
    Case("Llama, 2,048 tokens", 2048, llama, MLPS),
    Case("ViT-large (2 layers), 384 x 384", 384, vit),
    Case("Evoformer block, 64 residues", 64, evoformer, LAYERS),
    Case("UNet2D, 64 x 64", 64, unet),
    Case("UNet2DCondition, 64 x 64", 64, unet_condition),
)
GPU_CASES = (
    Case("GPT-2, 16,384 tokens", 16384, partial(gpt2, **WIDE), MLPS),
    Case("Llama, 16,384 tokens", 16384, partial(llama, **WIDE), MLPS),
    Case("ViT-large (2 layers), 1,536 x 1,536", 1536, vit),
    Case("Evoformer block, 512 residues", 512, evoformer, LAYERS),
    Case("UNet2D, 256 x 256", 256, unet),
    Case("UNet2DCondition, 128 x 128", 128, unet_condition),
)
# ColossalAI's test forms
COLOSSALAI = tuple(
    Case(name, size, make, {}, {"the least": None} | {f"within {n} MiB": n * MIB for n in budgets})
    for name, size, make, budgets in (
        ("GPT-2, 96 wide, 512 tokens", 512, partial(gpt2, width=96, heads=4), (6, 8)),
        ("ViT-large (2 layers), 384 x 384", 384, vit, (32, 40)),
        ("UNet2D of default width, 64 x 64", 64, unet_default, (150, 300)),
        ("Evoformer, 32 x 64", 64, evoformer, (20, 24)),
    )
)


def cpu_seconds(model: nn.Module, kwargs: dict[str, Any]) -> float:
    with torch.no_grad():
        start = time.process_time()
        model(**kwargs)
        return time.process_time() - start


def device_seconds(model: nn.Module, kwargs: dict[str, Any]) -> float:
    """Between two events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.no_grad():
        torch.cuda.synchronize()
        start.record()
        model(**kwargs)
        end.record()
        end.synchronize()
    return 1e-3 * start.elapsed_time(end)


def device_bytes(model: nn.Module, kwargs: dict[str, Any]) -> int:
    with torch.no_grad():
        return device_peak(partial(model, **kwargs)).requested


@dataclass(frozen=True)
class Meter:
    """Bytes of a run beyond weights and inputs, its seconds, and where models are made for it."""

    peak: Callable[[nn.Module, dict[str, Any]], int] = measured_peak
    seconds: Callable[[nn.Module, dict[str, Any]], float] = cpu_seconds
    where: Mapping[str, Any] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each")
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parts = sorted({part for several in PARTS.values() for part in several})
    parser.add_argument("--parts", nargs="+", choices=parts, help=f"tables, of {PARTS}")
    parser.add_argument("--device", default="cpu", choices=PARTS)
    gpu = parser.add_argument_group("with --device cuda")
    gpu.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=["bfloat16", "float32"])
    gpu.add_argument("--cap", type=float, default=20, help="GB that the second table may take")
    args = parser.parse_args()
    args.parts = args.parts or PARTS[args.device]
    if args.device == "cuda":
        print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}", flush=True)
        for name in args.dtypes:
            on_one_gpu(args, getattr(torch, name))
        return
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {cpu_name()}, one thread; {cores_and_load()} before.")
    if "models" in args.parts:
        table(HEAD)
        for case in (c for c in CASES if args.only in c.name):
            for fused in (False, True):
                rows(case, fused, Meter(), args.repeats)
    if "budgets" in args.parts:
        print("\nColossalAI's budgets, eager attention:")
        table(HEAD)
        for case in (c for c in COLOSSALAI if args.only in c.name):
            rows(case, False, Meter(), args.repeats)
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


def on_one_gpu(args: argparse.Namespace, dtype: torch.dtype) -> None:
    """The tables of a dtype; what fails is named, and the next goes on."""
    meter = Meter(device_bytes, device_seconds, {"device": "cuda", "dtype": dtype})
    start = time.perf_counter()
    rates = measure_rates(torch.device("cuda"), dtype)
    print(f"\n{dtype}; measured in {time.perf_counter() - start:.1f} s: {rates}", flush=True)
    if "models" in args.parts:
        table(HEAD)
        for case in (c for c in GPU_CASES if args.only in c.name):
            for fused in (False, True):
                attempt(partial(rows, case, fused, meter, args.repeats))
    if "capped" in args.parts:
        print(f"\nWithin {args.cap:g} GB, weights and inputs included:")
        table(CAP_HEAD)
        for one in (c for c in CAPPED if args.only in c.name):
            attempt(partial(capped_rows, one, dtype, int(args.cap * 1e9), rates, row))


def table(head: tuple[str, ...]) -> None:
    print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)


def row(*cells: object) -> None:
    print(f"| {' | '.join(str(cell) for cell in cells)} |", flush=True)


@dataclass(frozen=True)
class Subject:
    """A model as it is, beside which others are measured."""

    names: tuple[str, str]
    model: nn.Module
    kwargs: dict[str, Any]
    peak: int
    meter: Meter
    repeats: int


def rows(case: Case, fused: bool, meter: Meter, repeats: int) -> None:
    """The model as it is, chunked to each of its budgets, and changed by hand."""
    model, kwargs = made(case.make, case.size, fused, **meter.where)
    names = case.name, "fused" if fused else "eager"
    subject = Subject(names, model, kwargs, meter.peak(model, kwargs), meter, repeats)
    unchunked = unchunked_peak(model, (), kwargs)
    row(*names, "as it is", mib(unchunked), mib(subject.peak), *[""] * 5)
    for how, memory in case.budgets.items():
        start = time.process_time()
        try:
            chunked = autochunk(model, (), kwargs, memory, ANY if isinstance(memory, int) else 0.1)
        except BudgetError:
            row(*names, how, "no plan fits", *[""] * 6)
            continue
        plan, took = chunked.plan, time.process_time() - start
        report(subject, how, chunked, (mib(plan.peak), f"{plan.slowdown:+.1%}", f"{took:.1f}"))
    for how, change in case.by_hand.items():
        other, _ = made(case.make, case.size, fused, **meter.where)
        change(other)
        report(subject, how, other, ("", "", ""))


def report(one: Subject, how: str, other: nn.Module, predicted: tuple[str, str, str]) -> None:
    """A row about `other`, beside the model."""
    peak = one.meter.peak(other, one.kwargs)
    measured = mib(peak), f"{1 - peak / one.peak:.0%}"
    slower, off = slowdown(one, other), difference(one, other)
    found = predicted[1], f"{slower:+.1%}", f"{off:.1g}", predicted[2]
    row(*one.names, how, predicted[0], *measured, *found)


def slowdown(one: Subject, other: nn.Module) -> float:
    """The median of turns: the time that `other` takes more than the model, as a share."""
    seconds: Callable[[nn.Module], float] = partial(one.meter.seconds, kwargs=one.kwargs)
    turns = [(seconds(one.model), seconds(other)) for _ in range(one.repeats + 1)]
    return median(b / a for a, b in turns[1:]) - 1


def difference(one: Subject, other: nn.Module) -> float:
    """The largest difference of outputs, as a share of the largest value."""
    with torch.no_grad():
        pairs = zip(*(tensors(x(**one.kwargs)) for x in (other, one.model)), strict=True)
        return max(float((x - y).abs().max() / y.abs().max()) for x, y in pairs)


if __name__ == "__main__":
    main()
