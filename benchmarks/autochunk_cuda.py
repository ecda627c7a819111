"""AutoChunk on a GPU, for `python benchmarks/autochunk.py --device cuda`.

Peaks are those of torch's allocator in a run after a warm one, beyond what was there before: as
operators asked for them, workspaces of libraries included. Times are of CUDA events, in turns.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
from autochunk_longest import WITHIN, Longer, without_init
from autochunk_models import (
    Case,
    Made,
    chunk_layers,
    device_peak,
    evoformer,
    gpt2,
    llama,
    made,
    mib,
    tensors,
    tile_mlps,
    unet,
    unet_condition,
    vit,
)
from measure import attempt
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from wf_backends.autochunk import BudgetError, Rates, autochunk, longest, memory_profiles
from wf_backends.autochunk.cost import measure_rates
from wf_backends.graph import unchunked_peak

HEAD = ("model", "attention", "how", "predicted MiB", "measured MiB", "in blocks", "saved")
HEAD += ("predicted slowdown", "measured slowdown", "ms", "largest difference", "search s")
CAP_HEAD = ("model", "attention", "how", "length", "planned GB", "measured GB", "in blocks", "ran")
WIDE = {"width": 1024, "heads": 16}
MLPS = {"MLPs in 8 tiles by hand": tile_mlps}
CASES = (
    Case("GPT-2, 16,384 tokens", 16384, partial(gpt2, **WIDE), MLPS),
    Case("Llama, 16,384 tokens", 16384, partial(llama, **WIDE), MLPS),
    Case("ViT-large (2 layers), 1,536 x 1,536", 1536, vit, {}),
    Case("Evoformer block, 512 residues", 512, evoformer, {"chunk_layer by hand": chunk_layers}),
    Case("UNet2D, 256 x 256", 256, unet, {}),
    Case("UNet2DCondition, 128 x 128", 128, unet_condition, {}),
)
CAPPED = (
    Longer("GPT-2, tokens", partial(gpt2, **WIDE), 4096, False),
    Longer("Evoformer, residues", evoformer, 256, False, dims=2),
)
SPARE = 0.05  # of a cap: what the allocator loses to blocks, and workspaces
ROUNDS = 5
Print = Callable[..., None]


def main(only: str, dtypes: Sequence[str], parts: Sequence[str], cap: float, row: Print) -> None:
    """The tables `parts` ("models", "capped") for `dtypes`, of models whose name holds `only`."""
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}", flush=True)
    for name in dtypes:
        dtype = getattr(torch, name)
        start = time.perf_counter()
        rates = measure_rates(torch.device("cuda"), dtype)
        print(f"\n{name}; measured in {time.perf_counter() - start:.1f} s: {rates}", flush=True)
        if "models" in parts:
            _head(HEAD, row)
            for case in (c for c in CASES if only in c.name):
                for fused in (False, True):
                    attempt(partial(_rows, case, fused, dtype, row))
        if "capped" in parts:
            print(f"\nWithin {cap:g} GB, weights and inputs included, {SPARE:.0%} of it spare:")
            _head(CAP_HEAD, row)
            for one in (c for c in CAPPED if only in c.name):
                attempt(partial(_capped, one, dtype, int(cap * 1e9), rates, row))


def _head(names: tuple[str, ...], row: Print) -> None:
    print(flush=True)
    row(*names)
    print("|" + "---|" * len(names), flush=True)


def _rows(case: Case, fused: bool, dtype: torch.dtype, row: Print) -> None:
    """The model as it is, chunked to the least memory and to a fifth, and changed by hand."""
    words: dict[str, Any] = {"device": "cuda", "dtype": dtype}
    model, kwargs = made(case.make, case.size, fused, **words)
    name = case.name, "fused" if fused else "eager"
    with torch.no_grad():
        before = device_peak(partial(model, **kwargs))
    whole = before.requested
    row(*name, "as it is", "", mib(whole), mib(before.allocated), *[""] * 6)
    for how, memory in (("the least", None), ("within a fifth", 0.2)):
        start = time.perf_counter()
        try:
            chunked = autochunk(model, (), kwargs, memory)
        except BudgetError as error:
            row(*name, how, str(error).partition("bytes")[2].splitlines()[0][:80], *[""] * 8)
            continue
        plan, took = chunked.plan, time.perf_counter() - start
        predicted = mib(plan.peak), f"{plan.slowdown:+.1%}", f"{took:.1f}"
        _report((*name, how), predicted, model, chunked, kwargs, whole, row)
        del chunked
    for how, change in case.by_hand.items():
        other, _ = made(case.make, case.size, fused, **words)
        change(other)
        _report((*name, how), ("", "", ""), model, other, kwargs, whole, row)
        del other


def _report(
    names: tuple[str, ...],
    predicted: tuple[str, str, str],
    model: nn.Module,
    other: nn.Module,
    kwargs: dict[str, Any],
    whole: int,
    row: Print,
) -> None:
    """A row about `other`, beside the model."""
    with torch.no_grad():
        seen = device_peak(partial(other, **kwargs))
        slower, milliseconds = _slowdown(partial(model, **kwargs), partial(other, **kwargs))
        pairs = zip(tensors(other(**kwargs)), tensors(model(**kwargs)), strict=True)
        off = max(float((x - y).abs().max() / y.abs().max()) for x, y in pairs)
    measured = mib(seen.requested), mib(seen.allocated), f"{1 - seen.requested / whole:.0%}"
    times = predicted[1], f"{slower:+.1%}", f"{milliseconds:.1f}"
    row(*names, predicted[0], *measured, *times, f"{off:.1g}", predicted[2])


def _slowdown(model: Callable[[], object], other: Callable[[], object]) -> tuple[float, float]:
    """The median of turns: the time that `other` takes more than the model, as a share, and its
    milliseconds."""
    turns = [(_milliseconds(model), _milliseconds(other)) for _ in range(ROUNDS + 1)][1:]
    return median(b / a for a, b in turns) - 1, median(b for _, b in turns)


def _milliseconds(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _capped(case: Longer, dtype: torch.dtype, cap: int, rates: Rates, row: Print) -> None:
    """The longest that the plan says fits, as it is and in slices, run within the cap; and that
    the model as it is runs out of memory at 1.1 times its own."""

    def room(model: nn.Module, kwargs: dict[str, Any]) -> int:
        held = sum(x.nbytes for x in (*model.parameters(), *model.buffers(), *tensors(kwargs)))
        return int((1 - SPARE) * cap) - held

    def fits_whole(length: int) -> bool:
        model, kwargs = _fake(case, length, dtype)
        return unchunked_peak(model, (), kwargs) <= room(model, kwargs)

    def fits_in_slices(length: int) -> bool:
        model, kwargs = _fake(case, length, dtype)
        try:
            memory_profiles(model, kwargs, max(1, room(model, kwargs)), rates=rates)
        except BudgetError:
            return False
        return True

    step = case.length // 16
    whole = longest(fits_whole, step, case.length, WITHIN / 2)
    reach = longest(fits_in_slices, step, whole, WITHIN)
    beyond = -(-int(1.1 * whole) // 16) * 16
    with _cap(cap):
        for how, length, sliced in (
            ("as it is", whole, False),
            ("as it is, 1.1 times that", beyond, False),
            (f"in slices, {reach / whole:.1f} times", reach, True),
        ):
            names = case.name, "fused" if case.fused else "eager", how, length
            row(*names, *_run_within(case, length, dtype, room if sliced else None))
            gc.collect()
            torch.cuda.empty_cache()


def _fake(case: Longer, length: int, dtype: torch.dtype) -> Made:
    """On fake tensors of the GPU, which cannot be cast: they are made in the dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with FakeTensorMode(), without_init():
            return made(case.make, length, case.fused, device="cuda")
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _cap(count: int) -> Iterator[None]:
    """This process gets no more of the GPU than so many bytes."""
    torch.cuda.empty_cache()
    share = count / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, share))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _run_within(
    case: Longer, length: int, dtype: torch.dtype, room: Callable[..., int] | None
) -> tuple[object, ...]:
    """Planned and measured GB with weights, and whether it ran."""
    planned = ""
    try:
        model, kwargs = made(case.make, length, case.fused, device="cuda", dtype=dtype)
        held = torch.cuda.memory_allocated()
        if room is not None:
            model = autochunk(model, (), kwargs, room(model, kwargs))
            planned = f"{(held + model.plan.peak) / 1e9:.2f}"
            torch.cuda.empty_cache()  # what measuring the rates took
        with torch.no_grad():
            seen = device_peak(partial(model, **kwargs))
    except torch.OutOfMemoryError as error:
        return planned, "", "", f"out of memory: {str(error)[:60]}"
    return planned, *(f"{(held + x) / 1e9:.2f}" for x in (seen.requested, seen.allocated)), "yes"
