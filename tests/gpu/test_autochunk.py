"""AutoChunk on a GPU: outputs are those of the model, and peaks of memory those of the plan.

A peak is measured twice: as bytes of storages by a tracker, which the plan predicts, and as bytes
requested from torch's allocator, which include the workspaces of libraries. Tests print both.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.dense import largest
from wf_backends.autochunk import autochunk
from wf_backends.autochunk.cost import measure_rates
from wf_backends.autochunk.graph import StorageTracker

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import autochunk_models as models

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_tf32")]

ANY_SLOWDOWN = 4.0  # the tests are about memory
WORKSPACE_BYTES = 32 << 20  # of cuBLASLt, during a product with a bias
WIDE = {"width": 1024, "heads": 16}
CASES: dict[str, Callable[[bool], models.ModelAndInputs]] = {
    "gpt2": partial(models.gpt2, 4096, **WIDE),
    "llama": partial(models.llama, 4096, **WIDE),
    "vit": partial(models.vit, 768),
    "evoformer": partial(models.evoformer, 128),
    "unet": partial(models.unet, 128),
    "unet_condition": partial(models.unet_condition, 64),
}
CONVOLUTIONAL = ("vit", "unet", "unet_condition")  # cuDNN's workspaces have no known size
ATTENTIONS = ((False, torch.float32), (True, torch.float32), (True, torch.bfloat16))


def outputs(model: nn.Module, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [x.double() for x in models.tensors(model(**kwargs))]


def largest_error(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest difference, relative to the largest value of the tensor."""
    pairs = zip(actual, expected, strict=True)
    return largest(float((x - y).abs().max() / y.abs().max()) for x, y in pairs)


@pytest.mark.parametrize(("fused", "dtype"), ATTENTIONS, ids=["eager", "fused", "fused-bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_are_exact_and_peaks_are_those_of_the_plan(
    name: str, fused: bool, dtype: torch.dtype
) -> None:
    if name.startswith("unet"):
        pytest.importorskip("diffusers", reason="diffusers is not installed")
    model, kwargs = models.build(CASES[name], fused, device="cuda", dtype=dtype)
    addresses = {key: value.data_ptr() for key, value in model.state_dict().items()}
    chunked = autochunk(model, kwargs=kwargs, max_slowdown=ANY_SLOWDOWN)
    plan = chunked.plan

    model_outputs, chunked_outputs = outputs(model, kwargs), outputs(chunked, kwargs)
    reference = outputs(copy.deepcopy(model).double(), models.in_dtype(kwargs, torch.float64))
    model_error = largest_error(model_outputs, reference)
    chunked_error = largest_error(chunked_outputs, reference)
    difference = largest_error(chunked_outputs, model_outputs)
    del model_outputs, chunked_outputs, reference
    tracked_before, tracked = (models.measured_peak(x, kwargs) for x in (model, chunked))
    with torch.no_grad():
        device_peaks = [models.device_peak(partial(x, **kwargs)) for x in (model, chunked)]
    print(
        f"\n{name}, {'fused' if fused else 'eager'}, {dtype}: MiB predicted "
        f"{plan.peak_before >> 20} -> {plan.peak >> 20}, "
        f"tracked {tracked_before >> 20} -> {tracked >> 20}, "
        + ", ".join(
            f"requested {peak.requested >> 20} allocated {peak.allocated >> 20}"
            for peak in device_peaks
        )
        + f"; {len(plan.regions)} regions, slowdown {plan.slowdown:.1%}; error of the model "
        f"{model_error:.1e}, chunked {chunked_error:.1e}, between them {difference:.1e}"
    )

    assert {key: value.data_ptr() for key, value in chunked.state_dict().items()} == addresses
    assert chunked_error <= max(2 * model_error, 1e-5)
    if dtype is torch.float32 and name not in CONVOLUTIONAL:
        assert difference <= 1e-5
    assert tracked_before == pytest.approx(plan.peak_before, rel=0.05)
    assert tracked == pytest.approx(plan.peak, rel=0.05)
    if not fused:
        assert plan.saved > 0.5
    if name not in CONVOLUTIONAL:
        for predicted, peak in zip((plan.peak_before, plan.peak), device_peaks, strict=True):
            assert 0.95 * predicted <= peak.requested <= 1.05 * predicted + WORKSPACE_BYTES


@pytest.mark.parametrize("share", [0.5, 0.2, 0.1])
def test_a_budget_is_kept(share: float) -> None:
    model, kwargs = models.build(CASES["gpt2"], False, device="cuda")
    with torch.no_grad():
        peak_before = models.device_peak(lambda: model(**kwargs)).requested
        budget = int(share * peak_before)
        chunked = autochunk(model, kwargs=kwargs, max_memory=budget, max_slowdown=ANY_SLOWDOWN)
        peak = models.device_peak(lambda: chunked(**kwargs))
    print(
        f"\nMiB: budget {budget >> 20} of {peak_before >> 20}, predicted {chunked.plan.peak >> 20}",
        peak,
    )
    assert peak.requested <= budget + WORKSPACE_BYTES


def test_slices_compute_in_the_dtype_of_autocast_at_the_call() -> None:
    model, kwargs = models.build(CASES["llama"], True, device="cuda")
    model.requires_grad_(False)
    with torch.autocast("cuda", torch.bfloat16):
        chunked = autochunk(model, kwargs=kwargs, max_slowdown=ANY_SLOWDOWN)
        error = largest_error(outputs(chunked, kwargs), outputs(model, kwargs))
    assert chunked.plan.regions
    assert error <= 2e-2, error
    # Outside of autocast the forward is planned again.
    assert largest_error(outputs(chunked, kwargs), outputs(model, kwargs)) <= 1e-5


def test_the_peak_under_torch_compile_is_that_of_the_plan() -> None:
    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ x.transpose(-1, -2)).softmax(-1) @ x

    model, x = Attention().eval(), torch.randn(1, 8192, 64, device="cuda")
    chunked = autochunk(model, (x,), max_memory=0.3, max_slowdown=ANY_SLOWDOWN)
    compiled = torch.compile(chunked)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
        peak = models.device_peak(lambda: compiled(x))
    print(f"\ncompiled: predicted {chunked.plan.peak >> 20} MiB", peak)
    assert chunked.plan.regions
    assert peak.requested <= 1.05 * chunked.plan.peak + (1 << 20)


@pytest.mark.parametrize("checkpoints", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    ("dtype", "queries_per_key", "tolerance"),
    [(torch.float32, 1, 1e-5), (torch.float32, 2, 1e-5), (torch.bfloat16, 2, 3e-2)],
    ids=["float32", "float32-grouped", "bfloat16-grouped"],
)
def test_gradients_in_tiles_are_exact_and_the_peak_of_a_step_is_that_of_the_plan(
    dtype: torch.dtype, queries_per_key: int, tolerance: float, checkpoints: bool
) -> None:
    """The peak is counted without weights, their gradients and inputs.

    Grouped heads in float32 have no fused kernel in torch: all scores of a layer stay in memory.
    """
    sizes = {"width": 512, "layers": 2, "heads": 8, "vocabulary": 32768}
    make = partial(models.llama, **sizes, queries_per_key=queries_per_key)
    model, kwargs = models.build(make, 4096, True, device="cuda", dtype=dtype)
    batch = {"input_ids": kwargs["input_ids"], "labels": kwargs["input_ids"], "use_cache": False}
    model.train()
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def step() -> None:
        model(**batch).loss.backward()

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        step()
        return [x.grad.double() for x in model.parameters()]

    expected = gradients()
    tracked_before, peak_before = tracked_peak(step, model, batch), models.device_peak(step)
    tiled = autochunk(model, kwargs=batch, max_slowdown=0.5)
    actual = gradients()
    tracked, peak = tracked_peak(step, model, batch), models.device_peak(step)
    error = largest_error(actual, expected)

    plan = tiled.plan
    peaks = (
        (plan.peak_before, tracked_before, peak_before),
        (plan.peak, tracked, peak),
    )
    print(
        f"\ntraining, {dtype}, {queries_per_key} queries per key, checkpoints {checkpoints}; error "
        f"of the gradients {error:.1e}; bytes predicted, tracked, requested, allocated:"
    )
    for predicted, tracked_bytes, device_peak in peaks:
        print(
            f"{predicted:,} {tracked_bytes:,} {device_peak.requested:,} {device_peak.allocated:,}"
        )
    print(plan.explain())
    assert error <= tolerance
    for predicted, tracked_bytes, device_peak in peaks:
        assert tracked_bytes == pytest.approx(predicted, rel=0.05)
        upper_bound = 1.05 * predicted + WORKSPACE_BYTES
        assert 0.95 * predicted <= device_peak.requested <= upper_bound
    if dtype is torch.bfloat16 or queries_per_key == 1:
        assert peak.requested < 0.6 * peak_before.requested


def tracked_peak(step: Callable[[], None], model: nn.Module, batch: dict[str, Any]) -> int:
    """The peak of the storages of a step, without weights, their gradients and inputs."""
    weights = [*model.parameters(), *model.buffers()]
    grads = [weight.grad for weight in weights]
    excluded = [x for x in (*weights, *grads, *batch.values()) if torch.is_tensor(x)]
    gc.collect()
    with StorageTracker(excluded) as tracker:
        step()
    return tracker.peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_measured_rates_of_the_gpu_are_positive_and_finite(dtype: torch.dtype) -> None:
    """Prints them; on a shared GPU nothing is known of their size."""
    rates = measure_rates(torch.device("cuda"), dtype)
    print(f"\n{dtype} {rates}")
    values = asdict(rates)
    assert all(0 <= value < float("inf") for value in values.values()), values
    assert all(value > 0 for key, value in values.items() if key.endswith("_per_s")), values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torchs_kernel_for_fused_attention_computes_finite_numbers(dtype: torch.dtype) -> None:
    """Prints which kernel it is, causal and with grouped heads, for readers of the figures."""
    names = {0: "math", 1: "flash", 2: "memory-efficient", 3: "cuDNN"}
    q = torch.randn(1, 8, 512, 64, device="cuda", dtype=dtype)
    k = q[:, :4]
    causal = torch._fused_sdp_choice(q, q, q, is_causal=True)
    grouped = torch._fused_sdp_choice(q, k, k, is_causal=True, enable_gqa=True)
    print(f"\n{dtype} {names.get(causal, causal)}, grouped heads: {names.get(grouped, grouped)}")
    out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert out.isfinite().all()
