"""More tiny random transformers of diffusers, and the keyword arguments of a call."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from tests.integrations.diffusers_images import WIDTH, randn
from tests.integrations.diffusers_videos import WAN, wan_inputs

SIZES = {"in_channels": 2, "out_channels": 2, "num_layers": 2}


def cogview4() -> tuple[Any, dict[str, Any]]:
    """9 tokens of text, 3 x 3 of image."""
    model = diffusers.CogView4Transformer2DModel(
        **WIDTH, **SIZES, text_embed_dim=20, time_embed_dim=12, condition_dim=4
    )
    sizes = {name: torch.full((2, 2), 6) for name in ("original_size", "target_size")}
    return model, {
        "hidden_states": randn(2, 2, 6, 6),
        "encoder_hidden_states": randn(2, 9, 20),
        "timestep": torch.tensor([3, 5]),
        "crop_coords": torch.zeros(2, 2),
        **sizes,
    }


def cogview3plus() -> tuple[Any, dict[str, Any]]:
    model = diffusers.CogView3PlusTransformer2DModel(
        **WIDTH,
        **SIZES,
        text_embed_dim=20,
        time_embed_dim=12,
        condition_dim=4,
        pos_embed_max_size=6,
        sample_size=6,
    )
    return model, cogview4()[1]


def glm_image() -> tuple[Any, dict[str, Any]]:
    model = diffusers.GlmImageTransformer2DModel(
        **WIDTH,
        **SIZES,
        text_embed_dim=20,
        time_embed_dim=12,
        condition_dim=4,
        prior_vq_quantizer_codebook_size=8,
    )
    _, kwargs = cogview4()
    del kwargs["original_size"]
    prior = torch.arange(18).view(2, 9)
    dropped = {"prior_token_drop": torch.tensor([False, True])[:, None].expand(2, 9)}
    return model, kwargs | {"prior_token_id": prior % 8} | dropped


def hunyuan_dit() -> tuple[Any, dict[str, Any]]:
    """3 x 3 of image."""
    model = diffusers.HunyuanDiT2DModel(
        **WIDTH,
        in_channels=2,
        patch_size=2,
        sample_size=6,
        hidden_size=32,
        num_layers=4,
        cross_attention_dim=20,
        cross_attention_dim_t5=16,
        pooled_projection_dim=8,
        text_len=5,
        text_len_t5=3,
        use_style_cond_and_image_meta_size=False,
    )
    return model, {
        "hidden_states": randn(2, 2, 6, 6),
        "timestep": torch.tensor([3, 5]).double(),
        "encoder_hidden_states": randn(2, 5, 20),
        "text_embedding_mask": torch.tensor([[1, 1, 1, 0, 0]] * 2),
        "encoder_hidden_states_t5": randn(2, 3, 16),
        "text_embedding_mask_t5": torch.tensor([[1, 1, 0]] * 2),
        "image_rotary_emb": (randn(9, 16), randn(9, 17)[:, :16]),
    }


def prx() -> tuple[Any, dict[str, Any]]:
    """7 tokens of text, and 2 of padding, which are keys only; 4 x 4 of image."""
    model = diffusers.PRXTransformer2DModel(
        in_channels=2,
        context_in_dim=20,
        hidden_size=32,
        num_heads=2,
        depth=2,
        axes_dim=[8, 8],
    )
    return model, {
        "hidden_states": randn(2, 2, 8, 8),
        "timestep": torch.tensor([0.3, 0.5]).double(),
        "encoder_hidden_states": randn(2, 9, 20),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0, 0]] * 2).bool(),
    }


def allegro() -> tuple[Any, dict[str, Any]]:
    """2 x 3 x 3 of video."""
    model = diffusers.AllegroTransformer3DModel(
        **WIDTH | {"attention_head_dim": 12},
        **SIZES,
        cross_attention_dim=24,
        caption_channels=20,
        sample_height=6,
        sample_width=6,
        sample_frames=2,
    )
    places = torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(3)).T
    tables = tuple((randn(size, 4), randn(size, 5)[:, :4]) for size in (2, 3, 3))
    return model, {
        "hidden_states": randn(2, 2, 2, 6, 6),
        "encoder_hidden_states": randn(2, 7, 20),
        "encoder_attention_mask": torch.ones(2, 7).index_fill(1, torch.tensor([6]), 0.0),
        "timestep": torch.tensor([3, 5]),
        "image_rotary_emb": (tables, tuple(axis[None] for axis in places)),
    }


def easyanimate() -> tuple[Any, dict[str, Any]]:
    """9 tokens of text, 2 x 3 x 3 of video; the last block has no projections of the text."""
    model = diffusers.EasyAnimateTransformer3DModel(
        **WIDTH, **SIZES, patch_size=2, mmdit_layers=1, time_embed_dim=12, text_embed_dim=20
    )
    return model, {
        "hidden_states": randn(2, 2, 2, 6, 6),
        "encoder_hidden_states": randn(2, 9, 20),
        "timestep": torch.tensor([3, 5]),
    }


def kandinsky5() -> tuple[Any, dict[str, Any]]:
    """3 x 3 x 3 of video."""
    model = diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=2,
        out_visual_dim=2,
        in_text_dim=20,
        in_text_dim2=12,
        time_dim=8,
        model_dim=32,
        ff_dim=48,
        num_text_blocks=1,
        num_visual_blocks=2,
        axes_dims=(4, 6, 6),
    )
    return model, {
        "hidden_states": randn(1, 3, 6, 6, 2),
        "encoder_hidden_states": randn(1, 7, 20),
        "timestep": torch.tensor([300.0]).double(),
        "pooled_projections": randn(1, 12),
        "visual_rope_pos": (torch.arange(3),) * 3,
        "text_rope_pos": torch.arange(7),
    }


def framepack(samples: int = 2) -> tuple[Any, dict[str, Any]]:
    """3 tokens of an image, 5 of text, and 2 of padding; 2 x 3 x 3 of video, and its history."""
    model = diffusers.HunyuanVideoFramepackTransformer3DModel(
        **WIDTH,
        in_channels=2,
        out_channels=2,
        num_layers=1,
        num_single_layers=2,
        num_refiner_layers=1,
        text_embed_dim=20,
        pooled_projection_dim=12,
        rope_axes_dim=(4, 6, 6),
        has_image_proj=True,
        image_proj_dim=10,
        has_clean_x_embedder=True,
    )

    return model, {
        "hidden_states": randn(samples, 2, 2, 6, 6),
        "timestep": torch.tensor([3, 5])[:samples],
        "encoder_hidden_states": randn(samples, 7, 20),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0]] * samples),
        "pooled_projections": randn(samples, 12),
        "guidance": torch.tensor([3.0, 3.0]).double()[:samples],
        "image_embeds": randn(samples, 3, 10),
        "indices_latents": torch.arange(8, 10),
        "latents_clean": randn(samples, 2, 2, 6, 6) + 1,
        "indices_latents_clean": torch.arange(6, 8),
        "latents_history_2x": randn(samples, 2, 2, 6, 6) - 1,
        "indices_latents_history_2x": torch.arange(4, 6),
        "latents_history_4x": randn(samples, 2, 4, 6, 6),
        "indices_latents_history_4x": torch.arange(0, 4),
    }


def framepack_of_one() -> tuple[Any, dict[str, Any]]:
    """Where diffusers makes no mask."""
    return framepack(1)


def wan_animate() -> tuple[Any, dict[str, Any]]:
    """3 x 3 x 3 of video, and a face for each frame."""
    model = diffusers.WanAnimateTransformer3DModel(
        **WIDTH,
        **WAN | {"in_channels": 12},
        latent_channels=4,
        num_layers=2,
        image_dim=None,
        motion_encoder_channel_sizes={"4": 4, "8": 4, "16": 4},
        motion_encoder_size=16,
        motion_style_dim=6,
        motion_dim=4,
        motion_encoder_dim=6,
        face_encoder_hidden_dim=8,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=1,
    )
    return model, wan_inputs() | {
        "hidden_states": randn(1, 12, 3, 6, 6),
        "pose_hidden_states": randn(1, 4, 2, 6, 6),
        "face_pixel_values": randn(1, 3, 5, 16, 16),
    }
