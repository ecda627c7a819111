"""Tiny random transformers of diffusers, in float64, and the keyword arguments of a call."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from tests.integrations import diffusers_images as images
from tests.integrations import diffusers_videos as videos

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
}
if hasattr(diffusers, "Flux2Transformer2DModel"):  # since 0.36
    FAMILIES["flux2"] = images.flux2
if hasattr(diffusers, "ZImageTransformer2DModel"):
    FAMILIES |= {"z_image": images.z_image, "hunyuan_image": images.hunyuan_image}


def build(family: str, **sizes: Any) -> tuple[Any, dict[str, Any]]:
    """(model, keyword arguments of a call), the same in every call."""
    torch.manual_seed(1)
    model, kwargs = FAMILIES[family](**sizes)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.double(), kwargs
