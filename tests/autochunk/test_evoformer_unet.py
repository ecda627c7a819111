"""The Evoformer block of examples/fold and diffusers' UNets, in slices.

Outputs equal the unchunked model's in float64; peaks of memory equal the plan's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.autochunk.helpers import (
    ANY_SLOWDOWN,
    in_float64,
    measured_peak,
    relative_error,
    steps_of,
)
from wf_backends.autochunk import autochunk
from wf_backends.autochunk.cost import Rates
from wf_backends.autochunk.select import Search

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(Path(__file__).parents[2] / "examples" / "fold")
    from evoformer import EvoformerBlock

ModelAndInputs = tuple[nn.Module, dict[str, Any]]

UNET_SIZES: dict[str, Any] = {
    "sample_size": 16,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 8,
}


def evoformer(fused: bool) -> ModelAndInputs:
    inputs = {"msa": torch.randn(1, 8, 24, 32), "pair": torch.randn(1, 24, 24, 16)}
    return EvoformerBlock(32, 16, heads=2, pair_heads=2, width=8, fused=fused), inputs


def unet(fused: bool) -> ModelAndInputs:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    model = diffusers.UNet2DModel(
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        **UNET_SIZES,
    )
    return with_attention(model, fused), image(3)


def unet_condition(fused: bool) -> ModelAndInputs:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    model = diffusers.UNet2DConditionModel(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=2,
        **UNET_SIZES,
    )
    text = torch.randn(1, 7, 16)
    return with_attention(model, fused), image(4) | {"encoder_hidden_states": text}


def with_attention(model: nn.Module, fused: bool) -> nn.Module:
    from diffusers.models import attention_processor as processors

    processor: Any = processors.AttnProcessor2_0() if fused else processors.AttnProcessor()
    for module in model.modules():
        if isinstance(module, processors.Attention):
            module.set_processor(processor)
    return model


def image(channels: int) -> dict[str, Any]:
    sample = torch.randn(1, channels, 16, 16)
    return {"sample": sample, "timestep": torch.tensor(10), "return_dict": False}


@pytest.mark.parametrize("fused", [False, True], ids=["eager", "fused"])
@pytest.mark.parametrize(
    ("build", "max_memory", "least_saving"),
    [(evoformer, 0.5, 0.5), (unet, None, 0.1), (unet_condition, None, 0.1)],
    ids=["evoformer", "unet", "unet_condition"],
)
def test_outputs_equal_the_models_and_the_peak_equals_the_plans(
    build: Callable[[bool], ModelAndInputs],
    max_memory: float | None,
    least_saving: float,
    fused: bool,
) -> None:
    torch.manual_seed(0)
    model, kwargs = build(fused)
    model.double().eval()
    kwargs = in_float64(kwargs)
    chunked = autochunk(model, kwargs=kwargs, max_memory=max_memory, max_slowdown=ANY_SLOWDOWN)

    assert chunked.plan.peak_before == pytest.approx(measured_peak(model, kwargs), rel=0.05)
    assert chunked.plan.peak == pytest.approx(measured_peak(chunked, kwargs), rel=0.05)
    assert chunked.plan.saved >= least_saving
    with torch.no_grad():
        assert relative_error(chunked(**kwargs), model(**kwargs)) < 1e-12


def test_budgets_down_to_the_least_of_an_evoformer_block_are_met_at_little_cost() -> None:
    inputs = torch.zeros(1, 32, 64, 256), torch.zeros(1, 64, 64, 128)
    rates_of_a_cpu = Rates(
        launch_seconds=4e-6,
        flops_per_s=1.8e11,
        bytes_per_s=2.3e10,
        packed_bytes_per_s=2.5e10,
        interleaved_bytes_per_s=1.6e9,
        slice_seconds=1.8e-5,
    )
    search = Search(steps_of(EvoformerBlock(), *inputs), rates_of_a_cpu)
    for budget_mib in (12.0, 11.5, 11.0, 10.5, 10.1):  # the least peak is 10.03 MiB
        selection = search.within_memory(int(budget_mib * 2**20))
        assert selection.peak / 2**20 <= budget_mib
        assert selection.slowdown < 0.1
