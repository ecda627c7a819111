"""The longest sequences of benchmarks/autochunk.py, found by bisection on fake tensors."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
import transformers
from autochunk_models import (
    WIDE,
    Made,
    device_peak,
    evoformer,
    gpt2,
    llama,
    made,
    measured_peak,
    mib,
    tensors,
    unet,
    unet_condition,
    vit,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from wf_backends.autochunk import (
    BudgetError,
    ChunkPlan,
    Rates,
    autochunk,
    longest,
    memory_profiles,
)
from wf_backends.graph import unchunked_peak

ANY = float("inf")  # slowdown
LONGER_HEAD = ("model", "attention", "unchunked", "MiB", "chunked", "times", "elements, times")
LONGER_HEAD += ("slowdown", "real run MiB")
GPU_HEAD = ("model", "attention", "unchunked", "chunked", "times", "elements, times", "slowdown")
GPU_HEAD += ("weights GB", "most slices")
CAP_HEAD = ("model", "attention", "how", "length", "planned GB", "measured GB", "in blocks", "ran")
Budget = Callable[[nn.Module, dict[str, Any]], int]  # bytes for the activations of a call


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

    @property
    def names(self) -> tuple[str, str]:
        return self.name, "fused" if self.fused else "eager"

    def made(self, length: int, **where: Any) -> Made:
        return made(self.make, length, self.fused, **where)

    def fake(self, length: int, dtype: torch.dtype = torch.float32, **where: Any) -> Made:
        """On fake tensors, which cannot be cast: they are made in the dtype."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with FakeTensorMode(), without_init():
                return self.made(length, **where)
        finally:
            torch.set_default_dtype(before)


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
CAPPED = (
    Longer("GPT-2, tokens", partial(gpt2, **WIDE), 4096, False),
    Longer("Evoformer, residues", evoformer, 256, False, dims=2),
)
SPARE = 0.05  # of a cap: what the allocator loses to blocks, and workspaces


def without_init() -> AbstractContextManager[Any]:
    """Models of transformers get no weights."""
    where = "initialization" if int(transformers.__version__[0]) >= 5 else "modeling_utils"
    return import_module(f"transformers.{where}").no_init_weights()


def without_weights(total: int) -> Budget:
    """The budget that is left of `total` bytes after weights and inputs."""
    return lambda model, kwargs: total - weights_and_inputs(model, kwargs)


def weights_and_inputs(model: nn.Module, kwargs: dict[str, Any]) -> int:
    """Bytes."""
    return sum(x.nbytes for x in (*model.parameters(), *model.buffers(), *tensors(kwargs)))


def longest_whole(case: Longer, budget: Budget, **where: Any) -> int:
    """The longest sequence that fits without slices."""

    def fits(length: int) -> bool:
        model, kwargs = case.fake(length, **where)
        return unchunked_peak(model, (), kwargs) <= budget(model, kwargs)

    return longest(fits, case.length // 16, case.length, WITHIN / 2)


def longest_sliced(
    case: Longer, budget: Budget, known: int, within: float, *rates: Any, **where: Any
) -> tuple[int, ChunkPlan | None]:
    """The longest sequence that fits in slices, and its plan; `known` fits without slices.

    Args:
        rates: the largest slowdown, and of the device that is to run it; see `memory_profiles`.
    """
    plans: dict[int, ChunkPlan] = {}

    def fits(length: int) -> bool:
        model, kwargs = case.fake(length, **where)
        try:
            memory = max(1, budget(model, kwargs))
            plans[length] = memory_profiles(model, kwargs, memory, *rates).plan
        except BudgetError:
            return False
        return True

    longest_length = longest(fits, case.length // 16, known, within)
    return longest_length, plans.get(longest_length)


def times(case: Longer, whole: int, longest_length: int) -> tuple[str, str]:
    """How much longer, and how many times the elements."""
    return f"{longest_length / whole:.1f}", f"{(longest_length / whole) ** case.dims:.1f}"


def longer_cells(case: Longer) -> tuple[object, ...]:
    """The longest sequence within what the model needs at its first length."""
    model, kwargs = case.fake(case.length)
    budget = unchunked_peak(model, (), kwargs)
    longest_length, plan = longest_sliced(case, lambda *_: budget, case.length, WITHIN, ANY)
    slower, real = f"{plan.slowdown:+.1%}" if plan else "", ""
    if case.confirm:
        model, kwargs = case.made(longest_length)
        real = mib(measured_peak(autochunk(model, (), kwargs, budget, ANY), kwargs))
    longer = times(case, case.length, longest_length)
    return *case.names, case.length, mib(budget), longest_length, *longer, slower, real


def gpu_cells(case: Longer) -> tuple[object, ...]:
    """The longest sequence within a GPU's memory without and with slices, on fake tensors."""
    budget = without_weights(GPU)
    whole = longest_whole(case, budget)
    longest_length, plan = longest_sliced(case, budget, whole, WITHIN / 2, 0.1, Rates())
    assert plan is not None
    held = f"{weights_and_inputs(*case.fake(longest_length)) / 1e9:.1f}"
    slices = max(part.chunks for part in plan.regions)
    slower = f"{plan.slowdown:+.1%}"
    return (
        *case.names,
        whole,
        longest_length,
        *times(case, whole, longest_length),
        slower,
        held,
        slices,
    )


def capped_rows(
    case: Longer, dtype: torch.dtype, cap: int, rates: Rates, row: Callable[..., None]
) -> None:
    """The longest that the plan says fits, as it is and in slices, run within the cap of a GPU; and
    that the model as it is runs out of memory at 1.1 times its own."""
    budget = without_weights(int((1 - SPARE) * cap))
    where: dict[str, Any] = {"device": "cuda", "dtype": dtype}
    whole = longest_whole(case, budget, **where)
    longest_length, _ = longest_sliced(case, budget, whole, WITHIN, 0.1, rates, **where)
    beyond = -(-int(1.1 * whole) // 16) * 16
    with _cap(cap):
        for how, length, sliced in (
            ("as it is", whole, False),
            ("as it is, 1.1 times that", beyond, False),
            (f"in slices, {longest_length / whole:.1f} times", longest_length, True),
        ):
            cells = _run_within(case, length, budget if sliced else None, where)
            row(*case.names, how, length, *cells)
            gc.collect()
            torch.cuda.empty_cache()


@contextmanager
def _cap(count: int) -> Iterator[None]:
    """Limit this process to `count` bytes of the GPU."""
    torch.cuda.empty_cache()
    share = count / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, share))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _run_within(
    case: Longer, length: int, budget: Budget | None, where: dict[str, Any]
) -> tuple[object, ...]:
    """Planned and measured GB with weights, and whether it ran."""
    planned = ""
    try:
        model, kwargs = case.made(length, **where)
        held = torch.cuda.memory_allocated()
        if budget is not None:
            model = autochunk(model, (), kwargs, budget(model, kwargs))
            planned = f"{(held + model.plan.peak) / 1e9:.2f}"
            torch.cuda.empty_cache()  # what measuring the rates took
        with torch.no_grad():
            seen = device_peak(partial(model, **kwargs))
    except torch.OutOfMemoryError as error:
        return planned, "", "", f"out of memory: {str(error)[:60]}"
    return planned, *(f"{(held + x) / 1e9:.2f}" for x in (seen.requested, seen.allocated)), "yes"
