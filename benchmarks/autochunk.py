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

import autochunk_models as models
import torch
from autochunk_compiled import compiled_table
from autochunk_longest import ANY_SLOWDOWN, MAX_SLOWDOWN, a100_table, capped_table, small_table
from autochunk_models import MIB, WIDE, ModelAndInputs, mib
from measure import attempt, cores_and_load, cpu_name, cuda_seconds, print_head, print_row
from torch import nn

from wf_backends.autochunk import BudgetError, autochunk
from wf_backends.autochunk.cost import measure_rates
from wf_backends.autochunk.graph import unchunked_peak

HEAD = ("model", "attention", "how", "predicted MiB", "measured MiB", "saved")
HEAD += ("predicted slowdown", "measured slowdown", "largest difference", "search s")
SHARES = {"the least": None, "within a fifth": 0.2}
PARTS = {"cpu": ("models", "budgets", "longest", "gpu", "compiled"), "cuda": ("models", "capped")}


@dataclass(frozen=True)
class Case:
    """A model at a size, made by `make(size, fused)`.

    by_hand: by name, functions that change the model as people do by hand. budgets: by name, the
    memory of a plan: an int in bytes (with any slowdown), a float as a share of the unchunked peak
    or None for the least memory (both at most 10 % slower).
    """

    name: str
    size: int
    make: Callable[[int, bool], ModelAndInputs]
    by_hand: Mapping[str, Callable[[nn.Module], None]] = field(default_factory=dict)
    budgets: Mapping[str, float | None] = field(default_factory=SHARES.copy)


MLPS = {"MLPs in 8 tiles by hand": models.tile_mlps}
LAYERS = {"chunk_layer by hand": models.chunk_layers}
CASES = (
    Case("GPT-2, 2,048 tokens", 2048, models.gpt2, MLPS),
    Case("Llama, 2,048 tokens", 2048, models.llama, MLPS),
    Case("ViT-large (2 layers), 384 x 384", 384, models.vit),
    Case("Evoformer block, 64 residues", 64, models.evoformer, LAYERS),
    Case("UNet2D, 64 x 64", 64, models.unet),
    Case("UNet2DCondition, 64 x 64", 64, models.unet_condition),
    Case("Stable Diffusion's VAE, decoding 256 x 256", 256, models.vae),
)
GPU_CASES = (
    Case("GPT-2, 16,384 tokens", 16384, partial(models.gpt2, **WIDE), MLPS),
    Case("Llama, 16,384 tokens", 16384, partial(models.llama, **WIDE), MLPS),
    Case("ViT-large (2 layers), 1,536 x 1,536", 1536, models.vit),
    Case("Evoformer block, 512 residues", 512, models.evoformer, LAYERS),
    Case("UNet2D, 256 x 256", 256, models.unet),
    Case("UNet2DCondition, 128 x 128", 128, models.unet_condition),
)
# ColossalAI's test forms, with budgets in MiB
COLOSSALAI_CASES = tuple(
    Case(
        name,
        size,
        make,
        budgets={"the least": None}
        | {f"within {mebibytes} MiB": mebibytes * MIB for mebibytes in budgets},
    )
    for name, size, make, budgets in (
        ("GPT-2, 96 wide, 512 tokens", 512, partial(models.gpt2, width=96, heads=4), (6, 8)),
        ("ViT-large (2 layers), 384 x 384", 384, models.vit, (32, 40)),
        ("UNet2D of default width, 64 x 64", 64, models.unet_default, (150, 300)),
        ("Evoformer, 32 x 64", 64, models.evoformer, (20, 24)),
    )
)


def cpu_seconds(model: nn.Module, kwargs: dict[str, Any]) -> float:
    with torch.no_grad():
        start = time.process_time()
        model(**kwargs)
        return time.process_time() - start


def device_seconds(model: nn.Module, kwargs: dict[str, Any]) -> float:
    with torch.no_grad():
        return cuda_seconds(partial(model, **kwargs))


def device_bytes(model: nn.Module, kwargs: dict[str, Any]) -> int:
    with torch.no_grad():
        return models.device_peak(partial(model, **kwargs)).requested


@dataclass(frozen=True)
class Meter:
    """How to measure the peak (bytes) and the seconds of a run.

    placement: device and dtype of the model, as arguments of `models.build`.
    """

    peak: Callable[[nn.Module, dict[str, Any]], int] = models.measured_peak
    seconds: Callable[[nn.Module, dict[str, Any]], float] = cpu_seconds
    placement: Mapping[str, Any] = field(default_factory=dict)


def main() -> None:
    args = parse()
    if args.device == "cuda":
        print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}", flush=True)
        for name in args.dtypes:
            gpu_tables(args, getattr(torch, name))
    else:
        torch.set_num_threads(1)
        print(f"torch {torch.__version__}, {cpu_name()}, one thread; {cores_and_load()} before.")
        cpu_tables(args)


def parse() -> argparse.Namespace:
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
    return args


def cpu_tables(args: argparse.Namespace) -> None:
    if "models" in args.parts:
        print()
        print_head(*HEAD)
        for case in (case for case in CASES if args.only in case.name):
            for fused in (False, True):
                print_case(case, fused, Meter(), args.repeats)
    if "budgets" in args.parts:
        print("\nColossalAI's budgets, eager attention:\n")
        print_head(*HEAD)
        for case in (case for case in COLOSSALAI_CASES if args.only in case.name):
            print_case(case, False, Meter(), args.repeats)
    if "longest" in args.parts:
        small_table(args.only)
    if "gpu" in args.parts:
        a100_table(args.only)
    if "compiled" in args.parts:
        compiled_table(args.only)


def gpu_tables(args: argparse.Namespace, dtype: torch.dtype) -> None:
    """Print the tables of a dtype; a case that fails prints its traceback."""
    meter = Meter(device_bytes, device_seconds, {"device": "cuda", "dtype": dtype})
    start = time.perf_counter()
    rates = measure_rates(torch.device("cuda"), dtype)
    print(f"\n{dtype}; measured in {time.perf_counter() - start:.1f} s: {rates}", flush=True)
    if "models" in args.parts:
        print()
        print_head(*HEAD)
        for case in (case for case in GPU_CASES if args.only in case.name):
            for fused in (False, True):
                attempt(partial(print_case, case, fused, meter, args.repeats))
    if "capped" in args.parts:
        capped_table(args.only, dtype, int(args.cap * 1e9), rates)


@dataclass(frozen=True)
class Baseline:
    """An unchanged model, with which changed ones are compared.

    names: the first two cells of its rows, the model and its attention.
    """

    names: tuple[str, str]
    model: nn.Module
    kwargs: dict[str, Any]
    peak: int
    meter: Meter
    repeats: int


def print_case(case: Case, fused: bool, meter: Meter, repeats: int) -> None:
    """Print rows of the model as it is, chunked to each budget, and changed by hand."""
    model, kwargs = models.build(case.make, case.size, fused, **meter.placement)
    names = case.name, "fused" if fused else "eager"
    baseline = Baseline(names, model, kwargs, meter.peak(model, kwargs), meter, repeats)
    unchunked = unchunked_peak(model, (), kwargs)
    print_row(*names, "as it is", mib(unchunked), mib(baseline.peak), *[""] * 5)
    for how, memory in case.budgets.items():
        start = time.process_time()
        max_slowdown = ANY_SLOWDOWN if isinstance(memory, int) else MAX_SLOWDOWN
        try:
            chunked = autochunk(model, (), kwargs, memory, max_slowdown)
        except BudgetError:
            print_row(*names, how, "no plan fits", *[""] * 6)
            continue
        search_s = time.process_time() - start
        plan = chunked.plan
        predicted = (mib(plan.peak), f"{plan.slowdown:+.1%}", f"{search_s:.1f}")
        print_changed(baseline, how, chunked, predicted)
    for how, change in case.by_hand.items():
        changed, _ = models.build(case.make, case.size, fused, **meter.placement)
        change(changed)
        print_changed(baseline, how, changed, ("", "", ""))


def print_changed(
    baseline: Baseline, how: str, changed: nn.Module, predicted: tuple[str, str, str]
) -> None:
    """Print the row of a changed model, compared with the baseline.

    Args:
        predicted: peak in MiB, slowdown, seconds of the search.
    """
    peak = baseline.meter.peak(changed, baseline.kwargs)
    predicted_peak, predicted_slowdown, search_s = predicted
    cells = [predicted_peak, mib(peak), f"{1 - peak / baseline.peak:.0%}", predicted_slowdown]
    cells += [f"{slowdown(baseline, changed):+.1%}", f"{difference(baseline, changed):.1g}"]
    cells += [search_s]
    print_row(*baseline.names, how, *cells)


def slowdown(baseline: Baseline, changed: nn.Module) -> float:
    """Time of `changed` / time of the baseline - 1, the median over alternating runs."""
    seconds, kwargs = baseline.meter.seconds, baseline.kwargs
    ratios: list[float] = []
    for _ in range(baseline.repeats + 1):
        before = seconds(baseline.model, kwargs)
        ratios.append(seconds(changed, kwargs) / before)
    return median(ratios[1:]) - 1  # the first is a warm-up


def difference(baseline: Baseline, changed: nn.Module) -> float:
    """The largest difference of outputs, relative to the largest value of each output."""
    with torch.no_grad():
        outputs = models.tensors(changed(**baseline.kwargs))
        expected = models.tensors(baseline.model(**baseline.kwargs))
        pairs = zip(outputs, expected, strict=True)
        errors = [float((x - y).abs().max() / y.abs().max()) for x, y in pairs]
    return torch.tensor(errors).max().item()  # NaN if one is NaN


if __name__ == "__main__":
    main()
