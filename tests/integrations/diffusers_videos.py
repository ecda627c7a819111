"""Tiny random transformers of diffusers for videos, and the keyword arguments of a call."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from torch import Tensor

from tests.integrations.diffusers_images import WIDTH, randn

WAN = {"in_channels": 4, "out_channels": 4, "text_dim": 20, "freq_dim": 16, "ffn_dim": 48}


def wan_inputs(**timestep: Tensor) -> dict[str, Any]:
    text = {"encoder_hidden_states": randn(1, 7, 20)}
    return (
        {"hidden_states": randn(1, 4, 3, 6, 6), "timestep": torch.tensor([300])} | text | timestep
    )


def wan() -> tuple[Any, dict[str, Any]]:
    return diffusers.WanTransformer3DModel(**WIDTH, **WAN, num_layers=2), wan_inputs()


def wan_by_token() -> tuple[Any, dict[str, Any]]:
    """A timestep for each of 3 x 3 x 3 tokens, as in Wan 2.2 TI2V."""
    return wan()[0], wan_inputs(timestep=torch.arange(27).unsqueeze(0))


def wan_vace() -> tuple[Any, dict[str, Any]]:
    model = diffusers.WanVACETransformer3DModel(
        **WIDTH, **WAN, num_layers=2, vace_layers=[0, 1], vace_in_channels=6
    )
    control = {"control_hidden_states": randn(1, 6, 3, 6, 6)}
    return model, wan_inputs() | control | {"control_hidden_states_scale": randn(2)}


def ltx() -> tuple[Any, dict[str, Any]]:
    model = diffusers.LTXVideoTransformer3DModel(
        **WIDTH,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        cross_attention_dim=32,
        caption_channels=20,
    )
    return model, {
        "hidden_states": randn(2, 3 * 2 * 3, 4),
        "encoder_hidden_states": randn(2, 7, 20),
        "encoder_attention_mask": torch.ones(2, 7),
        "timestep": torch.tensor([300, 500]),
        "num_frames": 3,
        "height": 2,
        "width": 3,
    }


def ltx_by_token() -> tuple[Any, dict[str, Any]]:
    """A timestep for each of 3 x 2 x 3 tokens, as where the first frame is given."""
    model, kwargs = ltx()
    return model, kwargs | {"timestep": torch.arange(36).view(2, 18)}


def cogvideox(rotary: bool = True) -> tuple[Any, dict[str, Any]]:
    """5 tokens of text and 2 x 3 x 3 of video; positions rotary or learned."""
    model = diffusers.CogVideoXTransformer3DModel(
        **WIDTH,
        in_channels=2,
        out_channels=2,
        time_embed_dim=12,
        text_embed_dim=20,
        num_layers=2,
        sample_width=6,
        sample_height=6,
        sample_frames=5,
        max_text_seq_length=5,
        use_rotary_positional_embeddings=rotary,
    )
    kwargs = {
        "hidden_states": randn(2, 2, 2, 6, 6),
        "encoder_hidden_states": randn(2, 5, 20),
        "timestep": torch.tensor([3, 5]),
    }
    if rotary:
        kwargs["image_rotary_emb"] = (randn(18, 16), randn(18, 17)[:, :16])
    return model, kwargs


def hunyuan_video(**config: Any) -> tuple[Any, dict[str, Any]]:
    """5 tokens of text, and 2 of padding; 2 x 3 x 3 of video."""
    model = diffusers.HunyuanVideoTransformer3DModel(
        **WIDTH,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        text_embed_dim=20,
        pooled_projection_dim=12,
        rope_axes_dim=(4, 6, 6),
        **config,
    )
    return model, {
        "hidden_states": randn(2, 4, 2, 6, 6),
        "timestep": torch.tensor([3, 5]),
        "encoder_hidden_states": randn(2, 7, 20),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0]] * 2),
        "pooled_projections": randn(2, 12),
        "guidance": torch.tensor([3.0, 3.0]).double(),
    }
