"""The Evoformer block of the examples, and diffusers' UNets: exact in float64, with the predicted
peak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.autochunk.test_autochunk import ANY, in_float64, largest_difference, measured_peak
from wf_backends.autochunk import autochunk
from wf_backends.autochunk.cost import Rates
from wf_backends.autochunk.select import Search
from wf_backends.graph import Effects, capture, read_steps

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(Path(__file__).parents[2] / "examples" / "autochunk")
    from evoformer import EvoformerBlock

SMALL: dict[str, Any] = {
    "sample_size": 16,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 8,
}


def evoformer(fused: bool) -> tuple[nn.Module, dict[str, Any]]:
    inputs = {"msa": torch.randn(1, 8, 24, 32), "pair": torch.randn(1, 24, 24, 16)}
    return EvoformerBlock(32, 16, heads=2, pair_heads=2, width=8, fused=fused), inputs


def unet(fused: bool) -> tuple[nn.Module, dict[str, Any]]:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    model = diffusers.UNet2DModel(
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        **SMALL,
    )
    return with_attention(model, fused), image(3)


def unet_condition(fused: bool) -> tuple[nn.Module, dict[str, Any]]:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    model = diffusers.UNet2DConditionModel(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=2,
        **SMALL,
    )
    text = torch.randn(1, 7, 16)
    return with_attention(model, fused), image(4) | {"encoder_hidden_states": text}


def with_attention(model: nn.Module, fused: bool) -> nn.Module:
    from diffusers.models import attention_processor as kinds

    processor: Any = kinds.AttnProcessor2_0() if fused else kinds.AttnProcessor()
    for module in model.modules():
        if isinstance(module, kinds.Attention):
            module.set_processor(processor)
    return model


def image(channels: int) -> dict[str, Any]:
    sample = torch.randn(1, channels, 16, 16)
    return {"sample": sample, "timestep": torch.tensor(10), "return_dict": False}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("make", [evoformer, unet, unet_condition])
def test_outputs_are_the_models_and_the_peak_is_the_plans(make: Any, fused: bool) -> None:
    torch.manual_seed(0)
    share = 0.5 if make is evoformer else None  # None: the least
    model, kwargs = make(fused)
    model.double().eval()
    kwargs = in_float64(kwargs)
    chunked = autochunk(model, kwargs=kwargs, max_memory=share, max_slowdown=ANY)

    assert chunked.plan.peak_before == pytest.approx(measured_peak(model, kwargs), rel=0.05)
    assert chunked.plan.peak == pytest.approx(measured_peak(chunked, kwargs), rel=0.05)
    assert chunked.plan.saved >= (share or 0.1)
    with torch.no_grad():
        assert largest_difference(chunked(**kwargs), model(**kwargs)) < 1e-12


def test_a_region_gives_way_to_one_that_holds_more() -> None:
    """The cheapest regions may leave a peak between them that none of the rest holds."""
    inputs = torch.zeros(1, 32, 64, 256), torch.zeros(1, 64, 64, 128)
    captured = capture(EvoformerBlock().eval(), inputs, {})
    search = Search(read_steps(captured.graph, Effects()), Rates(2e-6, 9e10, 2.5e10, 9e9))
    for budget in (12.0, 11.5, 11.0, 10.5):  # MiB; the least is 10.03
        assert search.within_memory(int(budget * 2**20)).peak <= budget * 2**20
