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


def chronoedit() -> tuple[Any, dict[str, Any]]:
    return diffusers.ChronoEditTransformer3DModel(**WIDTH, **WAN, num_layers=2), wan_inputs()


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


def skyreels(timestep: Tensor | None = None, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    model = diffusers.SkyReelsV2Transformer3DModel(**WIDTH, **WAN, num_layers=2)
    return model, wan_inputs(**({} if timestep is None else {"timestep": timestep})) | kwargs


def skyreels_by_frame() -> tuple[Any, dict[str, Any]]:
    """A timestep for each of 3 frames: diffusion forcing."""
    return skyreels(torch.tensor([[100, 300, 500]]), enable_diffusion_forcing=True)


def cosmos(timestep: Tensor | None = None, **config: Any) -> tuple[Any, dict[str, Any]]:
    model = diffusers.CosmosTransformer3DModel(
        **WIDTH,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        text_embed_dim=20,
        adaln_lora_dim=8,
        max_size=(4, 8, 8),
        concat_padding_mask=False,  # it would need torchvision
        **config,
    )
    positions = randn(1, 27, 32)  # its own module takes no float64
    model.learnable_pos_embed.forward = lambda x: positions.to(x.dtype)
    return model, {
        "hidden_states": randn(1, 4, 3, 6, 6),
        "timestep": torch.tensor([0.3]).double() if timestep is None else timestep,
        "encoder_hidden_states": randn(1, 7, 20),
        "fps": 16,
    }


def cosmos_by_frame() -> tuple[Any, dict[str, Any]]:
    """A timestep for each of 3 frames, as where the first frames are given."""
    return cosmos(torch.tensor([0.1, 0.3, 0.5]).double().view(1, 1, 3, 1, 1))


def cosmos_control() -> tuple[Any, dict[str, Any]]:
    """With the residuals of a ControlNet, for every second block."""
    model, kwargs = cosmos(controlnet_block_every_n=2)
    return model, kwargs | {"block_controlnet_hidden_states": [randn(1, 27, 32)]}


def mochi() -> tuple[Any, dict[str, Any]]:
    """5 tokens of text, and 2 of padding; 2 x 3 x 3 of video."""
    model = diffusers.MochiTransformer3DModel(
        **WIDTH,
        in_channels=4,
        num_layers=2,
        pooled_projection_dim=24,
        text_embed_dim=16,
        time_embed_dim=12,
    )
    create = model.rope._create_rope  # which takes float32 positions, and parameters of any dtype
    model.rope._create_rope = lambda freqs, pos: create(freqs, pos.to(freqs.dtype))
    return model, {
        "hidden_states": randn(2, 4, 2, 6, 6),
        "timestep": torch.tensor([3, 5]),
        "encoder_hidden_states": randn(2, 7, 16),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0]] * 2).bool(),
    }


def hunyuan_video15(image: bool = False) -> tuple[Any, dict[str, Any]]:
    """4 tokens of text, 2 of glyphs, and padding of both; 2 x 3 x 3 of video."""
    model = diffusers.HunyuanVideo15Transformer3DModel(
        **WIDTH,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_refiner_layers=1,
        text_embed_dim=20,
        text_embed_2_dim=12,
        image_embed_dim=10,
        rope_axes_dim=(4, 6, 6),
    )
    return model, {
        "hidden_states": randn(2, 4, 2, 3, 3),
        "timestep": torch.tensor([3, 5]).double(),
        "encoder_hidden_states": randn(2, 6, 20),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]] * 2),
        "encoder_hidden_states_2": randn(2, 3, 12),
        "encoder_attention_mask_2": torch.tensor([[1, 1, 0]] * 2),
        "image_embeds": randn(2, 5, 10) * image,
    }


def hunyuan_video15_of_image() -> tuple[Any, dict[str, Any]]:
    return hunyuan_video15(image=True)


def ltx2(**config: Any) -> tuple[Any, dict[str, Any]]:
    """3 x 2 x 3 tokens of video and 4 of audio."""
    model = diffusers.LTX2VideoTransformer3DModel(
        **WIDTH,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        cross_attention_dim=32,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=8,
        audio_cross_attention_dim=16,
        caption_channels=20,
        **config,
    )
    return model, {
        "hidden_states": randn(2, 3 * 2 * 3, 4),
        "audio_hidden_states": randn(2, 4, 4),
        "encoder_hidden_states": randn(2, 7, 20),
        "audio_encoder_hidden_states": randn(2, 7, 20) + 1,
        "encoder_attention_mask": torch.ones(2, 7),
        "audio_encoder_attention_mask": torch.ones(2, 7),
        "timestep": torch.tensor([300, 500]),
        "audio_timestep": torch.tensor([200, 400]),
        "num_frames": 3,
        "height": 2,
        "width": 3,
        "audio_num_frames": 4,
    }


def ltx2_by_token() -> tuple[Any, dict[str, Any]]:
    """A timestep for each of 3 x 2 x 3 tokens, as where the first frame is given; LTX 2.3's
    rotary embeddings, and its second block without self-attention."""
    model, kwargs = ltx2(rope_type="split", perturbed_attn=True)
    timestep = {"timestep": torch.arange(36).view(2, 18)}
    return model, kwargs | timestep | {"spatio_temporal_guidance_blocks": [1]}
