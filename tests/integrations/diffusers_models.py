"""Tiny random transformers of diffusers, in float64, and the keyword arguments of a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import diffusers
import torch

from tests.integrations import diffusers_images as images
from tests.integrations import diffusers_other_models as others
from tests.integrations import diffusers_videos as videos
from tests.integrations.transformers_models import sequence_parallel
from wf_backends.comm import World

FAMILIES = {
    "dit": images.dit,
    "flux": images.flux,
    "wan": videos.wan,
    "wan_by_token": videos.wan_by_token,
    "wan_vace": videos.wan_vace,
    "sd3": images.sd3,
    "auraflow": images.auraflow,
    "chroma": images.chroma,
    "hunyuan_video": videos.hunyuan_video,
    "pixart": images.pixart,
    "ltx": videos.ltx,
    "ltx_by_token": videos.ltx_by_token,
    "cogvideox": videos.cogvideox,
    "qwen_image": images.qwen_image,
    "skyreels": videos.skyreels,
    "skyreels_by_frame": videos.skyreels_by_frame,
    "cosmos": videos.cosmos,
    "cosmos_by_frame": videos.cosmos_by_frame,
    "lumina2": images.lumina2,
    "mochi": videos.mochi,
    "flux_control": images.with_residuals(
        images.flux,
        controlnet_block_samples=[images.randn(2, 16, 32)],
        controlnet_single_block_samples=[images.randn(2, 16, 32)] * 2,
    ),
    "sd3_control": images.with_residuals(
        images.sd3, block_controlnet_hidden_states=[images.randn(2, 9, 32)] * 2
    ),
}
FAMILIES |= {
    "allegro": others.allegro,
    "cogview3plus": others.cogview3plus,
    "cogview4": others.cogview4,
    "easyanimate": others.easyanimate,
    "framepack": others.framepack,
    "framepack_of_one": others.framepack_of_one,
    "hunyuan_dit": others.hunyuan_dit,
}
if hasattr(diffusers, "Flux2Transformer2DModel"):  # since 0.36
    FAMILIES["flux2"] = images.flux2
if hasattr(diffusers, "ZImageTransformer2DModel"):
    FAMILIES |= {"z_image": images.z_image, "hunyuan_image": images.hunyuan_image}
    FAMILIES |= {"hunyuan_video15": videos.hunyuan_video15, "ltx2": videos.ltx2}
    FAMILIES["hunyuan_video15_of_image"] = videos.hunyuan_video15_of_image
    FAMILIES["ltx2_by_token"] = videos.ltx2_by_token
    FAMILIES |= {
        "chronoedit": videos.chronoedit,
        "cosmos_control": videos.cosmos_control,
        "glm_image": others.glm_image,
        "kandinsky5": others.kandinsky5,
        "prx": others.prx,
        "wan_animate": others.wan_animate,
        "bria": images.like_flux("BriaTransformer2DModel", axes_dims_rope=[4, 6, 6]),
        "ovis": images.like_flux("OvisImageTransformer2DModel", axes_dims_rope=(4, 6, 6)),
        "longcat": images.like_flux(
            "LongCatImageTransformer2DModel", axes_dims_rope=[4, 6, 6], pooled_projection_dim=24
        ),
    }
    FAMILIES["qwen_image_edit"] = images.qwen_image_edit
    FAMILIES["qwen_image_layered"] = images.qwen_image_layered
    FAMILIES["qwen_control"] = images.with_residuals(
        images.qwen_image, controlnet_block_samples=[images.randn(1, 16, 32)]
    )
    FAMILIES["z_control"] = images.with_residuals(
        images.z_image, controlnet_block_samples={0: images.randn(2, 64, 32)}
    )

MASK = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0, 0]])
TWO_TEXTS = {
    "framepack": images.with_residuals(others.framepack, encoder_attention_mask=MASK),
    "hunyuan_video": images.with_residuals(videos.hunyuan_video, encoder_attention_mask=MASK),
    "lumina2": images.with_residuals(images.lumina2, encoder_attention_mask=MASK),
    "mochi": images.with_residuals(videos.mochi, encoder_attention_mask=MASK.bool()),
}
"""Two samples, whose texts have different lengths."""
if "z_image" in FAMILIES:
    TWO_TEXTS |= {
        "hunyuan_image": images.with_residuals(
            images.hunyuan_image, encoder_attention_mask=MASK[:, 1:]
        ),
        "hunyuan_video15": images.with_residuals(
            videos.hunyuan_video15, encoder_attention_mask=MASK[:, 1:]
        ),
        "prx": images.with_residuals(
            others.prx, attention_mask=torch.arange(9) < torch.tensor([[8], [9]])
        ),
        "qwen_image_edit": images.with_residuals(
            images.qwen_image_edit, encoder_hidden_states_mask=MASK
        ),
        "z_image": images.with_residuals(
            images.z_image, cap_feats=[images.randn(5, 20), images.randn(37, 20)]
        ),
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
