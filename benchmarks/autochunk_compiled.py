"""The peak of a chunked model under torch.compile, a table of `autochunk.py` (--parts compiled)."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import autochunk_models as models
import torch
from autochunk_longest import ANY_SLOWDOWN
from autochunk_models import ModelAndInputs, mib
from measure import print_head, print_row
from torch._dynamo.exc import BackendCompilerFailed

from wf_backends.autochunk import autochunk

SHARE = 0.6  # of the unchunked peak, for the slices
CASES: dict[str, tuple[Callable[[int, bool], ModelAndInputs], int]] = {
    "GPT-2, 1,024 tokens": (models.gpt2, 1024),
    "Llama, 1,024 tokens": (models.llama, 1024),
    "ViT-large (2 layers), 384 x 384": (models.vit, 384),
    "Evoformer block, 48 residues": (models.evoformer, 48),
    "UNet2D, 64 x 64": (models.unet, 64),
    "UNet2DCondition, 64 x 64": (models.unet_condition, 64),
}


def compiled_table(only: str) -> None:
    """Print peaks as it is and in slices, eager and compiled by inductor.

    Models and images have the format in which inductor computes convolutions (channels_last).
    """
    print(f"\nUnder torch.compile, slices for {SHARE:.0%} of the unchunked peak:\n")
    head = ("model", "attention", "as it is MiB", "compiled MiB", "slices: plan MiB", "MiB")
    ratios = "compiled / as it is compiled", "compiled / plan", "without reuse / plan"
    print_head(*head, "compiled MiB", *ratios, "slices", "compiling s")
    for name, (make, size) in CASES.items():
        for fused in (False, True):
            if only in name:
                names = name, "fused" if fused else "eager"
                try:
                    print_row(*names, *compiled_cells(make, size, fused))
                except BackendCompilerFailed:
                    print_row(*names, "torch's inductor fails", *[""] * 9)


@torch.no_grad()
def compiled_cells(
    make: Callable[[int, bool], ModelAndInputs], size: int, fused: bool
) -> tuple[str, ...]:
    model, kwargs = models.build(make, size, fused)
    model.to(memory_format=torch.channels_last)
    kwargs = {name: in_channels_last(value) for name, value in kwargs.items()}
    whole = models.profiled_peak(partial(model, **kwargs))
    compiled_whole = compiled_peak(model, kwargs)
    chunked = autochunk(model, (), kwargs, SHARE, ANY_SLOWDOWN)
    in_slices = models.profiled_peak(partial(chunked, **kwargs))
    start = time.perf_counter()
    compiled = compiled_peak(chunked, kwargs)
    seconds = time.perf_counter() - start
    without_reuse = compiled_peak(chunked, kwargs, {"allow_buffer_reuse": False})
    plan = chunked.plan
    num_slices = sum(-(-region.rows // region.length) for region in plan.regions)
    cells = mib(whole), mib(compiled_whole), mib(plan.peak), mib(in_slices), mib(compiled)
    pairs = (compiled, compiled_whole), (compiled, plan.peak), (without_reuse, plan.peak)
    ratios = (f"{peak / other:.2f}" for peak, other in pairs)
    return *cells, *ratios, str(num_slices), f"{seconds:.0f}"


def compiled_peak(
    model: torch.nn.Module, kwargs: dict[str, Any], options: dict[str, Any] | None = None
) -> int:
    """The peak of a run, compiled with options of inductor."""
    torch.compiler.reset()
    run = partial(torch.compile(model, options=options), **kwargs)
    run()
    return models.profiled_peak(run)


def in_channels_last(value: Any) -> Any:
    is_image = isinstance(value, torch.Tensor) and value.ndim == 4
    return value.to(memory_format=torch.channels_last) if is_image else value
