"""Tiny random transformers of diffusers, in float64, and the keyword arguments of a call."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import diffusers
import torch

from tests.integrations import diffusers_images as images
from tests.integrations import diffusers_other_models as others
from tests.integrations import diffusers_videos as videos
from tests.integrations.diffusers_images import called_with, randn
from tests.integrations.transformers_models import sequence_parallel
from wf_backends.comm import World


def named(module: ModuleType, names: str) -> dict[str, Any]:
    """The functions of a module with these names."""
    return {name: getattr(module, name) for name in names.split()}


FAMILIES = {
    **named(images, "dit flux sd3 auraflow chroma pixart qwen_image lumina2"),
    **named(videos, "wan wan_by_token wan_vace hunyuan_video ltx ltx_by_token cogvideox mochi"),
    **named(videos, "skyreels skyreels_by_frame cosmos cosmos_by_frame"),
    **named(others, "allegro cogview3plus cogview4 easyanimate framepack framepack_of_one"),
    **named(others, "hunyuan_dit"),
    "flux_control": called_with(
        images.flux,
        controlnet_block_samples=[randn(2, 16, 32)],
        controlnet_single_block_samples=[randn(2, 16, 32)] * 2,
    ),
    "sd3_control": called_with(images.sd3, block_controlnet_hidden_states=[randn(2, 9, 32)] * 2),
}
if hasattr(diffusers, "Flux2Transformer2DModel"):  # since 0.36
    FAMILIES["flux2"] = images.flux2
if hasattr(diffusers, "ZImageTransformer2DModel"):
    FAMILIES |= {
        **named(images, "hunyuan_image qwen_image_edit qwen_image_layered z_image"),
        **named(videos, "chronoedit cosmos_control hunyuan_video15 hunyuan_video15_of_image"),
        **named(videos, "ltx2 ltx2_by_token"),
        **named(others, "glm_image kandinsky5 prx wan_animate"),
        "bria": images.like_flux("BriaTransformer2DModel", axes_dims_rope=[4, 6, 6]),
        "ovis": images.like_flux("OvisImageTransformer2DModel", axes_dims_rope=(4, 6, 6)),
        "longcat": images.like_flux(
            "LongCatImageTransformer2DModel", axes_dims_rope=[4, 6, 6], pooled_projection_dim=24
        ),
        "qwen_control": called_with(images.qwen_image, controlnet_block_samples=[randn(1, 16, 32)]),
        "z_control": called_with(images.z_image, controlnet_block_samples={0: randn(2, 64, 32)}),
    }

MASK = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0, 0]])
TWO_TEXTS = {
    "framepack": called_with(others.framepack, encoder_attention_mask=MASK),
    "hunyuan_video": called_with(videos.hunyuan_video, encoder_attention_mask=MASK),
    "lumina2": called_with(images.lumina2, encoder_attention_mask=MASK),
    "mochi": called_with(videos.mochi, encoder_attention_mask=MASK.bool()),
}
"""Two samples, whose texts have different lengths."""
if "z_image" in FAMILIES:
    TWO_TEXTS |= {
        "hunyuan_image": called_with(images.hunyuan_image, encoder_attention_mask=MASK[:, 1:]),
        "hunyuan_video15": called_with(videos.hunyuan_video15, encoder_attention_mask=MASK[:, 1:]),
        "prx": called_with(others.prx, attention_mask=torch.arange(9) < torch.tensor([[8], [9]])),
        "qwen_image_edit": called_with(images.qwen_image_edit, encoder_hidden_states_mask=MASK),
        "z_image": called_with(images.z_image, cap_feats=[randn(5, 20), randn(37, 20)]),
    }


def attention_modules(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "processor")]


def one_rank() -> Any:
    return sequence_parallel(World(1).comm(0))


def build(
    family: str, table: Mapping[str, Any] = FAMILIES, **sizes: Any
) -> tuple[Any, dict[str, Any]]:
    """(model, keyword arguments of a call), the same in every call."""
    torch.manual_seed(1)
    model, kwargs = table[family](**sizes)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.double(), kwargs
