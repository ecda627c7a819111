"""AutoChunk on the models of its paper (arXiv 2401.10652): memory, time, and how much longer.

    OMP_NUM_THREADS=1 python benchmarks/autochunk.py > benchmarks/results/autochunk.md
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python benchmarks/autochunk.py --device cuda

Peaks are bytes of live activations without weights and inputs: predicted by the plan, and measured
in a real run. On a CPU a tracker of storages measures the peak, and times are CPU time, so that
other processes on the machine do not count; models take turns. On a GPU the sizes are larger,
torch's allocator and CUDA events measure, and the longest lengths run within a cap of memory.
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
    """A model at a size, made by `make(size, fused)`.

    by_hand: functions that change the model as people do by hand, by name. budgets: by name; an int
    is bytes (any slowdown is allowed), a float a share of the peak (at most 10 % slower).
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
    """Seconds between two CUDA events."""
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
    """How to measure the peak (bytes) and the seconds of a run; device and dtype of the model."""

    peak: Callable[[nn.Module, dict[str, Any]], int] = measured_peak
    seconds: Callable[[nn.Module, dict[str, Any]], float] = cpu_seconds
    placement: Mapping[str, Any] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each")
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parts = sorted({part for parts in PARTS.values() for part in parts})
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
            gpu_tables(args, getattr(torch, name))
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


def gpu_tables(args: argparse.Namespace, dtype: torch.dtype) -> None:
    """Print the tables of a dtype; a row that fails prints its traceback."""
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
        for capped in (c for c in CAPPED if args.only in c.name):
            attempt(partial(capped_rows, capped, dtype, int(args.cap * 1e9), rates, row))


def table(head: tuple[str, ...]) -> None:
    print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)


def row(*cells: object) -> None:
    print(f"| {' | '.join(str(cell) for cell in cells)} |", flush=True)


@dataclass(frozen=True)
class Baseline:
    """An unchanged model, with which changed ones are compared."""

    names: tuple[str, str]
    model: nn.Module
    kwargs: dict[str, Any]
    peak: int
    meter: Meter
    repeats: int


def rows(case: Case, fused: bool, meter: Meter, repeats: int) -> None:
    """Print rows of the model as it is, chunked to each budget, and changed by hand."""
    model, kwargs = made(case.make, case.size, fused, **meter.placement)
    names = case.name, "fused" if fused else "eager"
    baseline = Baseline(names, model, kwargs, meter.peak(model, kwargs), meter, repeats)
    unchunked = unchunked_peak(model, (), kwargs)
    row(*names, "as it is", mib(unchunked), mib(baseline.peak), *[""] * 5)
    for how, memory in case.budgets.items():
        start = time.process_time()
        max_slowdown = ANY if isinstance(memory, int) else 0.1
        try:
            chunked = autochunk(model, (), kwargs, memory, max_slowdown)
        except BudgetError:
            row(*names, how, "no plan fits", *[""] * 6)
            continue
        search_s = time.process_time() - start
        plan = chunked.plan
        predicted = (mib(plan.peak), f"{plan.slowdown:+.1%}", f"{search_s:.1f}")
        report(baseline, how, chunked, predicted)
    for how, change in case.by_hand.items():
        changed, _ = made(case.make, case.size, fused, **meter.placement)
        change(changed)
        report(baseline, how, changed, ("", "", ""))


def report(baseline: Baseline, how: str, other: nn.Module, predicted: tuple[str, str, str]) -> None:
    """Print a row about `other`, compared with the baseline.

    Args:
        predicted: peak in MiB, slowdown, seconds of the search.
    """
    peak = baseline.meter.peak(other, baseline.kwargs)
    predicted_peak, predicted_slowdown, search_s = predicted
    cells = [predicted_peak, mib(peak), f"{1 - peak / baseline.peak:.0%}", predicted_slowdown]
    cells += [f"{slowdown(baseline, other):+.1%}", f"{difference(baseline, other):.1g}", search_s]
    row(*baseline.names, how, *cells)


def slowdown(baseline: Baseline, other: nn.Module) -> float:
    """Time of `other` / time of the baseline - 1, the median over alternating runs."""
    seconds: Callable[[nn.Module], float] = partial(baseline.meter.seconds, kwargs=baseline.kwargs)
    turns = [(seconds(baseline.model), seconds(other)) for _ in range(baseline.repeats + 1)]
    return median(b / a for a, b in turns[1:]) - 1


def difference(baseline: Baseline, other: nn.Module) -> float:
    """The largest difference of outputs, relative to the largest value."""
    with torch.no_grad():
        pairs = zip(*(tensors(x(**baseline.kwargs)) for x in (other, baseline.model)), strict=True)
        return max(float((x - y).abs().max() / y.abs().max()) for x, y in pairs)


if __name__ == "__main__":
    main()
