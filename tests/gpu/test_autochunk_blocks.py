"""AutoChunk on a GPU: blocks of U-Nets, long convolutions and autocast, beside the plan's peak.

Workspaces of cuDNN and cuFFT have no known size: what the allocator was asked for is printed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.autochunk.helpers import ANY_SLOWDOWN, Lambda
from tests.gpu.ranks_on_gpu import DEVICE
from tests.gpu.test_autochunk import WORKSPACE_BYTES, largest_error, models, outputs
from wf_backends.autochunk import autochunk

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_tf32")]

Made = tuple[nn.Module, Tensor]


def decoder(pixels: int, dims: int = 2) -> Made:
    """As in nnU-Net and V-Net."""

    def block(x: Tensor, up: nn.Module, norm: nn.Module, act: nn.Module, conv: nn.Module) -> Tensor:
        return conv(act(norm(up(x))))

    names = (f"{name}{dims}d" for name in ("ConvTranspose", "InstanceNorm", "Conv"))
    up, norm, conv = (getattr(nn, name) for name in names)
    parts = up(4, 16, 3, 2, 1, 1), norm(16, affine=True), nn.PReLU(16), conv(16, 2, 1)
    return Lambda(block, *parts), torch.randn(1, 4, *dims * [pixels])


def long_convolution(tokens: int) -> Made:
    """As in Hyena and S4."""

    def block(x: Tensor, up: nn.Module, down: nn.Module) -> Tensor:
        u = up(x).transpose(1, 2)
        spectra = torch.fft.rfft(u, n=2 * tokens)
        y = torch.fft.irfft(spectra * spectra.conj(), n=2 * tokens)[..., :tokens] / tokens
        return down((y * u).transpose(1, 2))

    return Lambda(block, nn.Linear(16, 256), nn.Linear(256, 16)), torch.randn(1, tokens, 16)


def scalar_prelu(tokens: int) -> Made:
    """One weight for all channels."""

    def block(x: Tensor, up: nn.Module, act: nn.Module, down: nn.Module) -> Tensor:
        return down(act(up(x)))

    parts = nn.Linear(16, 512), nn.PReLU(), nn.Linear(512, 16)
    return Lambda(block, *parts), torch.randn(1, tokens, 16)


CASES: dict[str, Callable[[], Made]] = {
    "images": partial(decoder, 256),
    "volumes": partial(decoder, 40, dims=3),
    "Fourier transforms": partial(long_convolution, 4096),
    "one PReLU": partial(scalar_prelu, 8192),
}
NAMES_AND_DTYPES = [
    *((name, torch.float32) for name in CASES),
    *((name, torch.bfloat16) for name in CASES if name != "Fourier transforms"),
]


def build(make: Callable[[], Made], dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model, x = make()
    return model.to(dtype).eval(), {"x": x.to(dtype)}


def requested(*runs: Callable[[], object]) -> Iterator[str]:
    """MiB that each run asks torch's allocator for."""
    with torch.no_grad():
        for run in runs if DEVICE == "cuda" else ():
            yield str(models.device_peak(run).requested >> 20)


@pytest.mark.parametrize(("name", "dtype"), NAMES_AND_DTYPES)
def test_blocks_are_exact_and_need_the_memory_of_the_plan(name: str, dtype: torch.dtype) -> None:
    model, kwargs = build(CASES[name], dtype)
    chunked = autochunk(model, kwargs=kwargs, max_slowdown=ANY_SLOWDOWN)
    plan = chunked.plan
    reference = outputs(copy.deepcopy(model).double(), models.in_dtype(kwargs, torch.float64))
    model_error, error = (largest_error(outputs(x, kwargs), reference) for x in (model, chunked))
    tracked_before, tracked = (models.measured_peak(x, kwargs) for x in (model, chunked))
    asked = requested(partial(model, **kwargs), partial(chunked, **kwargs))
    print(
        f"\n{name}, {dtype}: MiB predicted {plan.peak_before >> 20} -> {plan.peak >> 20}, tracked "
        f"{tracked_before >> 20} -> {tracked >> 20}, requested {' -> '.join(asked)}; "
        f"{len(plan.regions)} regions; error {error:.1e}, of the model {model_error:.1e}",
        flush=True,
    )
    assert plan.regions and plan.saved > 0.2
    assert error <= max(2 * model_error, 1e-5)
    assert tracked_before == pytest.approx(plan.peak_before, rel=0.05)
    assert tracked == pytest.approx(plan.peak, rel=0.05)


@pytest.mark.parametrize("enabled", [False, True], ids=["block without", "block with"])
@pytest.mark.parametrize("outside", [False, True], ids=["call without", "call with"])
def test_blocks_under_autocast_are_exact(enabled: bool, outside: bool) -> None:
    """Those that leave autocast as it is are sliced."""

    def block(x: Tensor, up: nn.Module, down: nn.Module) -> Tensor:
        wide = up(x).relu()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled):
            scale = x[:1, :1, :8] * 2
            total = scale.mT @ scale
        return down(wide * total.float().sum())

    parts = nn.Linear(16, 512), nn.Linear(512, 16)
    model, kwargs = build(lambda: (Lambda(block, *parts), torch.randn(16, 256, 16)))
    model.to(DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=outside):
        chunked = autochunk(model, kwargs=kwargs, max_slowdown=ANY_SLOWDOWN)
        error = largest_error(outputs(chunked, kwargs), outputs(model, kwargs))
    bound = 2e-2 if outside else 1e-5  # products of slices may take another kernel
    print(f"\nautocast {outside}, in the block {enabled}: error {error:.1e}", flush=True)
    assert chunked.plan.regions
    assert error <= bound
    with torch.autocast(DEVICE, torch.bfloat16, enabled=not outside):
        error = largest_error(outputs(chunked, kwargs), outputs(model, kwargs))
    assert error <= (1e-5 if outside else 2e-2)


def test_compiled_images_are_exact_and_need_the_memory_of_the_plan() -> None:
    model, kwargs = build(partial(decoder, 768))
    chunked = autochunk(model, kwargs=kwargs, max_memory=0.65, max_slowdown=ANY_SLOWDOWN)
    compiled = torch.compile(chunked)
    assert chunked.plan.peak + 2 * WORKSPACE_BYTES < chunked.plan.peak_before
    error = largest_error(outputs(compiled, kwargs), outputs(model, kwargs))
    peaks = list(requested(partial(model, **kwargs), partial(compiled, **kwargs)))
    predicted = chunked.plan.peak >> 20
    print(
        f"\ncompiled: predicted {predicted} MiB, requested {peaks}; error {error:.1e}", flush=True
    )
    assert error <= 1e-5
    if DEVICE == "cuda":
        assert int(peaks[1]) <= 1.05 * predicted + (WORKSPACE_BYTES >> 20)
