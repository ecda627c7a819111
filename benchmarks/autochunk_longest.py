"""The longest sequences of benchmarks/autochunk.py, found by bisection on fake tensors.

A length is in the unit of AutoChunk's paper: tokens, or the side of a picture or of a protein.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import autochunk_models as models
import torch
import transformers
from autochunk_models import ModelAndInputs
from measure import attempt, print_head, print_row
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from wf_backends.autochunk import (
    BudgetError,
    Profiles,
    Rates,
    autochunk,
    longest,
    memory_profiles,
)
from wf_backends.autochunk.graph import (
    Effects,
    module_path,
    operator_name,
    read_steps,
    unchunked_peak,
)

ANY_SLOWDOWN = float("inf")
MAX_SLOWDOWN = 0.1
PRECISION = 0.06  # of a longest length, relative to it
A100_BYTES = 80 * 10**9  # the paper's GPU
RESERVED = 0.05  # share of a cap: for workspaces, and blocks of the allocator that are not full
Budget = Callable[[nn.Module, dict[str, Any]], int]  # (model, inputs) -> bytes for activations


@dataclass(frozen=True)
class LengthCase:
    """A model whose longest sequence is searched.

    make: the model and its inputs, from the length and `fused`. length: a length that fits without
    slices. dims: the model has length ** dims elements. confirm: also run the longest sequence.
    """

    name: str
    make: Callable[[int, bool], ModelAndInputs]
    length: int
    fused: bool
    dims: int = 1
    confirm: bool = False

    @property
    def names(self) -> tuple[str, str]:
        """The first two cells of a row: the model, and its attention."""
        return self.name, "fused" if self.fused else "eager"

    def build(self, length: int, **placement: Any) -> ModelAndInputs:
        return models.build(self.make, length, self.fused, **placement)

    def build_fake(
        self, length: int, dtype: torch.dtype = torch.float32, **placement: Any
    ) -> ModelAndInputs:
        """The same on fake tensors. They cannot be cast, so they are created in `dtype`."""
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with FakeTensorMode(), without_init():
                return self.build(length, **placement)
        finally:
            torch.set_default_dtype(default)

    def growth(self, short: int, long: int) -> tuple[str, str]:
        """How many times as long `long` is as `short`, and how many times the elements it has."""
        return f"{long / short:.1f}", f"{(long / short) ** self.dims:.1f}"


SMALL_CASES = (
    LengthCase("GPT-2, tokens", models.gpt2, 1024, False, confirm=True),
    LengthCase("GPT-2, tokens", models.gpt2, 1024, True),
    LengthCase("Llama, tokens", models.llama, 1024, False, confirm=True),
    LengthCase("ViT-large, pixels of a side", models.vit, 384, False, dims=2),
    LengthCase("ViT-large, pixels of a side", models.vit, 768, False, dims=2),
    LengthCase("Evoformer, residues", models.evoformer, 48, False, dims=2, confirm=True),
    LengthCase("Evoformer, residues", models.evoformer, 512, False, dims=2),
)
A100_CASES = tuple(
    LengthCase(name, make, length, fused, dims)
    for name, make, length, dims in (
        ("GPT-2, tokens", models.gpt2, 16384, 1),
        ("Llama, tokens", models.llama, 16384, 1),
        ("ViT-large, pixels of a side", models.vit, 1024, 2),
        ("Evoformer, residues", models.evoformer, 512, 2),
        ("UNet2D, pixels of a side", models.unet, 128, 2),
        ("UNet2DCondition, pixels of a side", models.unet_condition, 128, 2),
    )
    for fused in (False, True)
)
CAPPED_CASES = (
    LengthCase("GPT-2, tokens", partial(models.gpt2, **models.WIDE), 4096, False),
    LengthCase("Evoformer, residues", models.evoformer, 256, False, dims=2),
)


def small_table(only: str) -> None:
    """The longest sequence within the memory that the model needs unchunked at `case.length`."""
    print("\nThe longest sequence within what the unchunked model needs at the first length:\n")
    head = ("model", "attention", "unchunked", "MiB", "chunked", "times", "elements, times")
    print_head(*head, "slowdown", "real run MiB")
    for case in (case for case in SMALL_CASES if only in case.name):
        model, kwargs = case.build_fake(case.length)
        memory = unchunked_peak(model, (), kwargs)
        length, planned = longest_chunked(
            case, lambda *_, memory=memory: memory, case.length, PRECISION, ANY_SLOWDOWN
        )
        slowdown = f"{planned.plan.slowdown:+.1%}" if planned else ""
        real_peak = ""
        if case.confirm:
            model, kwargs = case.build(length)
            chunked = autochunk(model, (), kwargs, memory, ANY_SLOWDOWN)
            real_peak = models.mib(models.measured_peak(chunked, kwargs))
        growth = case.growth(case.length, length)
        lengths = case.length, models.mib(memory), length
        print_row(*case.names, *lengths, *growth, slowdown, real_peak)


def a100_table(only: str) -> None:
    """The longest sequence in the memory of the paper's GPU, without and with slices, and what is
    live at the peak of its plan."""
    print("\nThe longest sequence within 80 GB, weights and inputs included:\n")
    head = ("model", "attention", "unchunked", "chunked", "times", "elements, times", "slowdown")
    print_head(*head, "weights GB", "most slices")
    budget, found = without_weights(A100_BYTES), list[tuple[LengthCase, Profiles]]()
    for case in (case for case in A100_CASES if only in case.name):
        whole = longest_unchunked(case, budget)
        length, planned = longest_chunked(
            case, budget, whole, PRECISION / 2, MAX_SLOWDOWN, rates=Rates()
        )
        assert planned is not None
        found.append((case, planned))
        plan = planned.plan
        weights = f"{weights_and_inputs(*case.build_fake(length)) / 1e9:.1f}"
        slices = max(region.chunks for region in plan.regions)
        growth = case.growth(whole, length)
        print_row(*case.names, whole, length, *growth, f"{plan.slowdown:+.1%}", weights, slices)
    print("\nLive at the peaks of these plans, beside weights and inputs:\n")
    print_head("model", "attention", "peak GB", "values of 1 GB or more, in GB, and their modules")
    for case, planned in found:
        print_row(*case.names, f"{planned.plan.peak / 1e9:.1f}", live_at_peak(planned))


def live_at_peak(planned: Profiles, least: float = 1e9) -> str:
    """The values of `least` bytes or more that are live at the peak, each with its module."""
    steps = read_steps(planned.lowered.module.graph, Effects())
    peak = steps.peaks.index(max(steps.peaks))
    cells: list[str] = []
    for storage, num_bytes in steps.storage_bytes.items():
        made_by = steps.nodes_by_storage[storage][0]
        if num_bytes >= least and steps.position[made_by] <= peak <= steps.last_use[storage]:
            name = module_path(made_by) or "the model"
            cells.append(f"{num_bytes / 1e9:.1f} {name} ({operator_name(made_by)})")
    if steps.steps[peak].temporary >= least:
        cells.append(f"{steps.steps[peak].temporary / 1e9:.1f} of a slice")
    return ", ".join(cells)


def capped_table(only: str, dtype: torch.dtype, cap: int, rates: Rates) -> None:
    """Run the longest sequences within `cap` bytes of this GPU; a case that fails is reported."""
    print(f"\nWithin {cap / 1e9:g} GB, weights and inputs included:\n")
    head = ("model", "attention", "how", "length", "planned GB", "measured GB", "in blocks", "ran")
    print_head(*head)
    for case in (case for case in CAPPED_CASES if only in case.name):
        attempt(partial(capped_rows, case, dtype, cap, rates))


def capped_rows(case: LengthCase, dtype: torch.dtype, cap: int, rates: Rates) -> None:
    """Run the longest unchunked and chunked lengths that should fit.

    The unchunked model at 1.1 times its longest length is to run out of memory.
    """
    budget = without_weights(int((1 - RESERVED) * cap))
    placement: dict[str, Any] = {"device": "cuda", "dtype": dtype}
    whole = longest_unchunked(case, budget, **placement)
    length, _ = longest_chunked(case, budget, whole, PRECISION, MAX_SLOWDOWN, rates, **placement)
    beyond = -(-int(1.1 * whole) // 16) * 16
    with _memory_cap(cap):
        for how, tried_length, chunk_budget in (
            ("as it is", whole, None),
            ("as it is, 1.1 times that", beyond, None),
            (f"in slices, {length / whole:.1f} times", length, budget),
        ):
            cells = _run_within_cap(case, tried_length, chunk_budget, placement)
            print_row(*case.names, how, tried_length, *cells)
            gc.collect()
            torch.cuda.empty_cache()


def longest_unchunked(case: LengthCase, budget: Budget, **placement: Any) -> int:
    """The longest sequence that fits without slices."""

    def fits(length: int) -> bool:
        model, kwargs = case.build_fake(length, **placement)
        return unchunked_peak(model, (), kwargs) <= budget(model, kwargs)

    return longest(fits, case.length // 16, case.length, PRECISION / 2)


def longest_chunked(
    case: LengthCase,
    budget: Budget,
    known: int,
    precision: float,
    max_slowdown: float,
    rates: Rates | None = None,
    **placement: Any,
) -> tuple[int, Profiles | None]:
    """The longest sequence that fits in slices, and what is planned (None if that is `known`).

    Args:
        known: a length that fits without slices.
        precision: of the length, relative to it.
        rates: of the device that is to run it; None = this one.
    """
    plans: dict[int, Profiles] = {}

    def fits(length: int) -> bool:
        model, kwargs = case.build_fake(length, **placement)
        try:
            memory = max(1, budget(model, kwargs))
            plans[length] = memory_profiles(model, kwargs, memory, max_slowdown, rates)
        except BudgetError:
            return False
        return True

    length = longest(fits, case.length // 16, known, precision)
    return length, plans.get(length)


def without_init() -> AbstractContextManager[Any]:
    """A context in which models of transformers skip the initialization of their weights."""
    module = "initialization" if int(transformers.__version__[0]) >= 5 else "modeling_utils"
    return import_module(f"transformers.{module}").no_init_weights()


def without_weights(total: int) -> Budget:
    """The budget for activations: `total` bytes minus weights and inputs."""
    return lambda model, kwargs: total - weights_and_inputs(model, kwargs)


def weights_and_inputs(model: nn.Module, kwargs: dict[str, Any]) -> int:
    """Bytes of the model's parameters and buffers, and of its inputs."""
    return sum(x.nbytes for x in (*model.parameters(), *model.buffers(), *models.tensors(kwargs)))


@contextmanager
def _memory_cap(nbytes: int) -> Iterator[None]:
    """Limit this process to `nbytes` of the GPU."""
    torch.cuda.empty_cache()
    share = nbytes / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, share))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _run_within_cap(
    case: LengthCase, length: int, budget: Budget | None, placement: dict[str, Any]
) -> tuple[str, ...]:
    """The cells: planned and measured GB with weights, measured GB in blocks, whether it ran.

    Without a budget the model runs unchunked.
    """
    planned = ""
    try:
        model, kwargs = case.build(length, **placement)
        before = torch.cuda.memory_allocated()
        if budget is not None:
            model = autochunk(model, (), kwargs, budget(model, kwargs))
            planned = f"{(before + model.plan.peak) / 1e9:.2f}"
            torch.cuda.empty_cache()  # the memory in which rates were measured
        with torch.no_grad():
            peak = models.device_peak(partial(model, **kwargs))
    except torch.OutOfMemoryError as error:
        return planned, "", "", f"out of memory: {str(error)[:60]}"
    requested, allocated = ((before + x) / 1e9 for x in (peak.requested, peak.allocated))
    return planned, f"{requested:.2f}", f"{allocated:.2f}", "yes"
