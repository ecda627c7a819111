"""AutoChunk on a GPU: the model's outputs, its state, and the memory that the plan says.

Peaks are counted twice: storages by a tracker, which the plan predicts, and the bytes that torch's
allocator was asked for, in which libraries' workspaces are, too. Each test prints its figures.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
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
from wf_backends.graph import StorageTracker

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import autochunk_models as models

pytestmark = pytest.mark.gpu

ANY = 4.0  # slowdown: memory is the matter here
WORKSPACE = 32 << 20  # of cuBLASLt, for the time of a product with a bias
WIDE = {"width": 1024, "heads": 16}
CASES: dict[str, Callable[[bool], models.ModelAndInputs]] = {
    "gpt2": partial(models.gpt2, 4096, **WIDE),
    "llama": partial(models.llama, 4096, **WIDE),
    "vit": partial(models.vit, 768),
    "evoformer": partial(models.evoformer, 128),
    "unet": partial(models.unet, 128),
    "unet_condition": partial(models.unet_condition, 64),
}
CONVOLVE = ("vit", "unet", "unet_condition")  # cuDNN's workspaces are as large as it likes


FORMS = ((False, torch.float32), (True, torch.float32), (True, torch.bfloat16))


@pytest.fixture(autouse=True)
def no_tf32() -> Iterator[None]:
    switches = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [switch.allow_tf32 for switch in switches]
    for switch in switches:
        switch.allow_tf32 = False
    yield
    for switch, allowed in zip(switches, before, strict=True):
        switch.allow_tf32 = allowed
    gc.collect()
    torch.cuda.empty_cache()


def outputs(model: nn.Module, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [x.double() for x in models.tensors(model(**kwargs))]


def difference(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    pairs = zip(found, wanted, strict=True)
    return largest(float((x - y).abs().max() / y.abs().max()) for x, y in pairs)


@pytest.mark.parametrize(("fused", "dtype"), FORMS, ids=["eager", "fused", "fused-bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_are_the_models_and_the_peak_is_the_plans(
    name: str, fused: bool, dtype: torch.dtype
) -> None:
    if name.startswith("unet"):
        pytest.importorskip("diffusers", reason="diffusers is not installed")
    model, kwargs = models.build(CASES[name], fused, device="cuda", dtype=dtype)
    state = {key: value.data_ptr() for key, value in model.state_dict().items()}
    chunked = autochunk(model, kwargs=kwargs, max_slowdown=ANY)
    plan = chunked.plan

    own, ours = outputs(model, kwargs), outputs(chunked, kwargs)
    exact = outputs(copy.deepcopy(model).double(), models.in_dtype(kwargs, torch.float64))
    errors = difference(own, exact), difference(ours, exact)
    direct = difference(ours, own)
    del own, ours, exact
    before, after = (models.measured_peak(x, kwargs) for x in (model, chunked))
    with torch.no_grad():
        asked = [models.device_peak(partial(x, **kwargs)) for x in (model, chunked)]
    print(
        f"\n{name}, {'fused' if fused else 'eager'}, {dtype}: MiB predicted "
        f"{plan.peak_before >> 20} -> {plan.peak >> 20}, tracked {before >> 20} -> {after >> 20}, "
        + ", ".join(f"requested {a.requested >> 20} allocated {a.allocated >> 20}" for a in asked)
        + f"; {len(plan.regions)} regions, slowdown {plan.slowdown:.1%}; error {errors[0]:.1e}, "
        f"ours {errors[1]:.1e}, between them {direct:.1e}"
    )

    assert {key: value.data_ptr() for key, value in chunked.state_dict().items()} == state
    assert errors[1] <= max(2 * errors[0], 1e-5)
    if dtype is torch.float32 and name not in CONVOLVE:
        assert direct <= 1e-5
    assert before == pytest.approx(plan.peak_before, rel=0.05)
    assert after == pytest.approx(plan.peak, rel=0.05)
    if not fused:
        assert plan.saved > 0.5
    if name not in CONVOLVE:
        for predicted, seen in zip((plan.peak_before, plan.peak), asked, strict=True):
            assert 0.95 * predicted <= seen.requested <= 1.05 * predicted + WORKSPACE


@pytest.mark.parametrize("share", [0.5, 0.2, 0.1])
def test_a_budget_is_kept(share: float) -> None:
    model, kwargs = models.build(CASES["gpt2"], False, device="cuda")
    with torch.no_grad():
        whole = models.device_peak(lambda: model(**kwargs)).requested
        budget = int(share * whole)
        chunked = autochunk(model, kwargs=kwargs, max_memory=budget, max_slowdown=ANY)
        seen = models.device_peak(lambda: chunked(**kwargs))
    print(
        f"\nMiB: budget {budget >> 20} of {whole >> 20}, predicted {chunked.plan.peak >> 20}", seen
    )
    assert seen.requested <= budget + WORKSPACE


def test_autocast_is_seen() -> None:
    """The slices compute in the types of autocast, which holds at the call."""
    model, kwargs = models.build(CASES["llama"], True, device="cuda")
    model.requires_grad_(False)
    with torch.autocast("cuda", torch.bfloat16):
        chunked = autochunk(model, kwargs=kwargs, max_slowdown=ANY)
        found = difference(outputs(chunked, kwargs), outputs(model, kwargs))
    assert chunked.plan.regions
    assert found <= 2e-2, found
    assert difference(outputs(chunked, kwargs), outputs(model, kwargs)) <= 1e-5  # planned anew


def test_the_saving_holds_under_torch_compile() -> None:
    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ x.transpose(-1, -2)).softmax(-1) @ x

    model, x = Attention().eval(), torch.randn(1, 8192, 64, device="cuda")
    chunked = autochunk(model, (x,), max_memory=0.3, max_slowdown=ANY)
    compiled = torch.compile(chunked)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
        seen = models.device_peak(lambda: compiled(x))
    print(f"\ncompiled: predicted {chunked.plan.peak >> 20} MiB", seen)
    assert chunked.plan.regions
    assert seen.requested <= 1.05 * chunked.plan.peak + (1 << 20)


@pytest.mark.parametrize("checkpoints", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    ("dtype", "queries_per_key", "error"),
    [(torch.float32, 1, 1e-5), (torch.float32, 2, 1e-5), (torch.bfloat16, 2, 3e-2)],
    ids=["float32", "float32-grouped", "bfloat16-grouped"],
)
def test_training_in_tiles(
    dtype: torch.dtype, queries_per_key: int, error: float, checkpoints: bool
) -> None:
    """Gradients, and the peak of a step beyond weights, their gradients and inputs.

    Grouped heads in float32 have no fused kernel in torch: all scores of a layer stay.
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

    wanted, whole = gradients(), (tracked(step, model, batch), models.device_peak(step))
    tiled = autochunk(model, kwargs=batch, max_slowdown=0.5)
    found, seen = gradients(), (tracked(step, model, batch), models.device_peak(step))
    off = difference(found, wanted)
    plan = tiled.plan
    print(
        f"\ntraining, {dtype}, {queries_per_key} queries a key, checkpoints {checkpoints}; "
        f"gradients off by {off:.1e}; predicted, tracked, requested, in blocks:"
    )
    pairs = ((plan.peak_before, *whole), (plan.peak, *seen))
    for told, counted, asked in pairs:
        print(f"{told:,} {counted:,} {asked.requested:,} {asked.allocated:,} bytes")
    print(plan.explain())
    assert off <= error
    for told, counted, asked in pairs:
        assert counted == pytest.approx(told, rel=0.05)
        assert 0.95 * told <= asked.requested <= 1.05 * told + WORKSPACE
    if dtype is torch.bfloat16 or queries_per_key == 1:
        assert seen[1].requested < 0.6 * whole[1].requested


def tracked(step: Callable[[], None], model: nn.Module, batch: dict[str, Any]) -> int:
    """Bytes of the storages of a step, beyond weights, their gradients and inputs."""
    weights = [*model.parameters(), *model.buffers()]
    known = [
        x for x in (*weights, *(w.grad for w in weights), *batch.values()) if torch.is_tensor(x)
    ]
    gc.collect()
    with StorageTracker(known) as seen:
        step()
    return seen.peak


def test_rates_of_the_device() -> None:
    """Figures for whoever reads them: how fast a shared GPU is just now is no matter of a test."""
    print()
    for dtype in (torch.float32, torch.bfloat16):
        rates = measure_rates(torch.device("cuda"), dtype)
        print(dtype, rates)
        found = asdict(rates)
        assert all(0 <= value < float("inf") for value in found.values()), found
        assert all(value > 0 for key, value in found.items() if key.endswith("_per_s")), found


def test_which_kernel_torch_takes_is_told() -> None:
    """For whoever reads the figures of fused attention: a causal and a full one, by dtype."""
    names = {0: "math", 1: "flash", 2: "memory-efficient", 3: "cuDNN"}
    print()
    for dtype in (torch.float32, torch.bfloat16):
        q = torch.randn(1, 8, 512, 64, device="cuda", dtype=dtype)
        causal = torch._fused_sdp_choice(q, q, q, is_causal=True)
        grouped = torch._fused_sdp_choice(q, q[:, :4], q[:, :4], is_causal=True, enable_gqa=True)
        print(dtype, names.get(causal, causal), "grouped heads:", names.get(grouped, grouped))
        out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        assert out.isfinite().all()
