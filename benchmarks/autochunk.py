"""AutoChunk on the models of its paper (arXiv 2401.10652): memory, time, and how much longer.

    OMP_NUM_THREADS=1 python benchmarks/autochunk.py > benchmarks/results/autochunk.md

Peaks are bytes of live activations beyond weights and inputs: predicted by the plan, and seen by a
tracker of storages in a real run. Times are of the CPU, in turns, so that other processes on the
machine do not count.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from autochunk_models import (
    CASES,
    Case,
    Made,
    evoformer,
    gpt2,
    llama,
    unet,
    unet_condition,
    unet_default,
    vit,
)
from measure import cores_and_load, cpu_name
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from transformers.modeling_utils import no_init_weights

from wf_backends.autochunk import BudgetError, ChunkPlan, Rates, autochunk, longest, memory_profiles
from wf_backends.graph.memory import StorageTracker, unchunked_peak

MIB = 1 << 20
ANY = float("inf")  # slowdown
HEAD = ("model", "attention", "how", "predicted MiB", "measured MiB", "saved")
HEAD += ("predicted slowdown", "measured slowdown", "largest difference", "search s")
LONGER_HEAD = ("model", "attention", "unchunked", "MiB", "chunked", "times", "elements, times")
LONGER_HEAD += ("slowdown", "real run MiB")
GPU_HEAD = ("model", "attention", "unchunked", "chunked", "times", "elements, times", "slowdown")
GPU_HEAD += ("weights GB", "most slices")

# ColossalAI's test forms: a name, the model, budgets in MiB
COLOSSALAI = (
    ("GPT-2, 96 wide, 512 tokens", partial(gpt2, 512, width=96, heads=4), (None, 6, 8)),
    ("ViT-large (2 layers), 384 x 384", partial(vit, 384), (None, 32, 40)),
    ("UNet2D of default width, 64 x 64", partial(unet_default, 64), (None, 150, 300)),
    ("Evoformer, 32 x 64", partial(evoformer, 64), (None, 20, 24)),
)


@dataclass(frozen=True)
class Longer:
    """How much longer: the model by its length in the paper's unit, of which the model has length
    to the power of `dims` elements; a length that fits unchunked; whether a real run is made."""

    name: str
    make: Callable[[int, bool], Made]
    length: int
    fused: bool
    dims: int = 1
    confirm: bool = False


LONGER = (
    Longer("GPT-2, tokens", gpt2, 1024, False, confirm=True),
    Longer("GPT-2, tokens", gpt2, 1024, True),
    Longer("Llama, tokens", llama, 1024, False, confirm=True),
    Longer("ViT-large, pixels of a side", vit, 384, False, dims=2),
    Longer("ViT-large, pixels of a side", vit, 768, False, dims=2),
    Longer("Evoformer, residues", evoformer, 48, False, dims=2, confirm=True),
    Longer("Evoformer, residues", evoformer, 512, False, dims=2),
)
WITHIN = 0.06  # of the longest
GPU = 80 * 10**9  # bytes: the paper's A100
ON_GPU = tuple(
    Longer(name, make, length, fused, dims)
    for name, make, length, dims in (
        ("GPT-2, tokens", gpt2, 16384, 1),
        ("Llama, tokens", llama, 16384, 1),
        ("ViT-large, pixels of a side", vit, 1024, 2),
        ("Evoformer, residues", evoformer, 512, 2),
        ("UNet2D, pixels of a side", unet, 128, 2),
        ("UNet2DCondition, pixels of a side", unet_condition, 128, 2),
    )
    for fused in (False, True)
)
PARTS = ("models", "budgets", "longest", "gpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each")
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="tables")
    args = parser.parse_args()
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
            longer_row(case)
    if "gpu" in args.parts:
        print("\nThe longest sequence within 80 GB, weights and inputs included:")
        table(GPU_HEAD)
        for case in (c for c in ON_GPU if args.only in c.name):
            gpu_row(case)


def table(head: tuple[str, ...]) -> None:
    print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}")


def row(*cells: object) -> None:
    print(f"| {' | '.join(str(cell) for cell in cells)} |", flush=True)


def made(make: Callable[..., Made], *args: Any) -> Made:
    """The model in evaluation mode, with the same weights and inputs every time."""
    torch.manual_seed(0)
    model, kwargs = make(*args)
    return model.eval(), kwargs


def rows(case: Case, fused: bool, repeats: int) -> None:
    """The model as it is, chunked, and changed by hand."""
    model, kwargs = made(case.make, case.size, fused)
    attention = "fused" if fused else "eager"
    chunked, search = searched(model, kwargs, None, 0.1)
    before = measured_peak(model, kwargs)
    row(case.name, attention, "as it is", mib(chunked.plan.peak_before), mib(before), *[""] * 5)
    predicted = (mib(chunked.plan.peak), f"{chunked.plan.slowdown:+.1%}", f"{search:.1f}")
    report(case.name, attention, "autochunk", predicted, model, chunked, kwargs, before, repeats)
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


def on_fake_tensors(case: Longer, length: int) -> Made:
    with FakeTensorMode(), no_init_weights():
        return made(case.make, length, case.fused)


def longer_row(case: Longer) -> None:
    """The longest sequence whose plan fits, by bisection on fake tensors."""
    model, kwargs = on_fake_tensors(case, case.length)
    budget = unchunked_peak(model, (), kwargs)
    slower: dict[int, float] = {}

    def fits(length: int) -> bool:
        try:
            profiles = memory_profiles(*on_fake_tensors(case, length), budget, ANY)
        except BudgetError:
            return False
        slower[length] = profiles.plan.slowdown
        return True

    reach = longest(fits, case.length // 16, case.length, WITHIN)
    real = ""
    if case.confirm:
        model, kwargs = made(case.make, reach, case.fused)
        real = mib(measured_peak(autochunk(model, (), kwargs, budget, ANY), kwargs))
    row(
        case.name,
        "fused" if case.fused else "eager",
        case.length,
        mib(budget),
        reach,
        f"{reach / case.length:.1f}",
        f"{(reach / case.length) ** case.dims:.1f}",
        f"{slower[reach]:+.1%}" if reach in slower else "",
        real,
    )


def gpu_row(case: Longer) -> None:
    """The longest sequence within a GPU's memory without and with slices, on fake tensors."""
    plans: dict[int, ChunkPlan] = {}

    def fits_whole(length: int) -> bool:
        model, kwargs = on_fake_tensors(case, length)
        return weights_and_inputs(model, kwargs) + unchunked_peak(model, (), kwargs) <= GPU

    def fits_in_slices(length: int) -> bool:
        model, kwargs = on_fake_tensors(case, length)
        room = GPU - weights_and_inputs(model, kwargs)
        if room <= 0:
            return False
        try:
            plans[length] = memory_profiles(model, kwargs, room, rates=Rates()).plan
        except BudgetError:
            return False
        return True

    step = case.length // 16
    whole = longest(fits_whole, step, case.length, WITHIN / 2)
    reach = longest(fits_in_slices, step, whole, WITHIN / 2)
    row(
        case.name,
        "fused" if case.fused else "eager",
        whole,
        reach,
        f"{reach / whole:.1f}",
        f"{(reach / whole) ** case.dims:.1f}",
        f"{plans[reach].slowdown:+.1%}",
        f"{weights_and_inputs(*on_fake_tensors(case, reach)) / 1e9:.1f}",
        max(part.chunks for part in plans[reach].regions),
    )


def weights_and_inputs(model: nn.Module, kwargs: dict[str, Any]) -> int:
    """Bytes."""
    return sum(x.nbytes for x in (*model.parameters(), *model.buffers(), *tensors(kwargs)))


def searched(
    model: nn.Module, kwargs: dict[str, Any], memory: int | None, most: float
) -> tuple[Any, float]:
    """The chunked model, and the seconds that capture, search and lowering took."""
    start = time.process_time()
    chunked = autochunk(model, (), kwargs, memory, most)
    return chunked, time.process_time() - start


def measured_peak(model: nn.Module, kwargs: dict[str, Any]) -> int:
    """Live bytes of a real run beyond weights and inputs."""
    inputs = [v for v in kwargs.values() if isinstance(v, torch.Tensor)]
    gc.collect()
    with torch.no_grad(), StorageTracker((*model.parameters(), *model.buffers(), *inputs)) as seen:
        model(**kwargs)
    return seen.peak


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


def tensors(outputs: Any) -> Iterator[torch.Tensor]:
    return (x for x in pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor))


def mib(count: int) -> str:
    return f"{count / MIB:.2f}"


if __name__ == "__main__":
    main()
