"""How much longer a sequence may be: the third and fourth table of benchmarks/autochunk.py.

By bisection on fake tensors, where a model of any length costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import transformers
from autochunk_models import (
    Made,
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


def without_init() -> AbstractContextManager[Any]:
    """Models of transformers get no weights."""
    where = "initialization" if int(transformers.__version__[0]) >= 5 else "modeling_utils"
    return import_module(f"transformers.{where}").no_init_weights()


def on_fake_tensors(case: Longer, length: int) -> Made:
    with FakeTensorMode(), without_init():
        return made(case.make, length, case.fused)


def longer_cells(case: Longer) -> tuple[object, ...]:
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
    return (
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


def gpu_cells(case: Longer) -> tuple[object, ...]:
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
    return (
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
