"""Tiny random transformers of diffusers, in float64, and the keyword arguments of a call."""

from __future__ import annotations

import inspect
from typing import Any

import diffusers
import torch
from torch import Tensor

WIDTH = {"num_attention_heads": 2, "attention_head_dim": 16}
WAN = {"in_channels": 4, "out_channels": 4, "text_dim": 20, "freq_dim": 16, "ffn_dim": 48}
FLUX = {"in_channels": 4, "num_single_layers": 2, "joint_attention_dim": 24}


def randn(*shape: int) -> Tensor:
    """Random numbers, the same for the same shape."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def dit() -> tuple[Any, dict[str, Any]]:
    """3 x 3 patches: 9 tokens, which 2 and 4 do not divide."""
    model = diffusers.DiTTransformer2DModel(
        **WIDTH, in_channels=2, num_layers=2, sample_size=6, num_embeds_ada_norm=8
    )
    model.eval()  # in training it drops labels, with a generator that the ranks' threads share
    labels = {"timestep": torch.tensor([3, 5]), "class_labels": torch.tensor([1, 2])}
    return model, {"hidden_states": randn(2, 2, 6, 6), **labels}


def flux(text: int = 5, image: int = 16) -> tuple[Any, dict[str, Any]]:
    model = diffusers.FluxTransformer2DModel(
        **WIDTH, **FLUX, num_layers=2, pooled_projection_dim=12, axes_dims_rope=(4, 6, 6)
    )
    ids = torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(image / 4))
    return model, {
        "hidden_states": randn(2, image, 4),
        "encoder_hidden_states": randn(2, text, 24),
        "pooled_projections": randn(2, 12),
        "timestep": torch.tensor([0.3, 0.7]).double(),
        "img_ids": ids.double(),
        "txt_ids": torch.zeros(text, 3).double(),
    }


def wan() -> tuple[Any, dict[str, Any]]:
    model = diffusers.WanTransformer3DModel(**WIDTH, **WAN, num_layers=2)
    return model, {
        "hidden_states": randn(1, 4, 3, 6, 6),
        "timestep": torch.tensor([300]),
        "encoder_hidden_states": randn(1, 7, 20),
    }


def pixart() -> tuple[Any, dict[str, Any]]:
    model = diffusers.PixArtTransformer2DModel(
        **WIDTH,
        in_channels=2,
        out_channels=2,
        num_layers=2,
        sample_size=6,
        cross_attention_dim=32,
        caption_channels=20,
        use_additional_conditions=False,
    )
    return model, {
        "hidden_states": randn(2, 2, 6, 6),
        "encoder_hidden_states": randn(2, 7, 20),
        "encoder_attention_mask": torch.ones(2, 7).index_fill(1, torch.tensor([6]), 0.0),
        "timestep": torch.tensor([3, 5]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


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


def qwen_image(text: int = 5) -> tuple[Any, dict[str, Any]]:
    model = diffusers.QwenImageTransformer2DModel(
        **WIDTH,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        joint_attention_dim=24,
        axes_dims_rope=(4, 6, 6),
    )
    kwargs = {
        "hidden_states": randn(1, 16, 4),
        "encoder_hidden_states": randn(1, text, 24),
        "timestep": torch.tensor([0.3]).double(),
        "img_shapes": [[(1, 4, 4)]],
    }
    parameters = inspect.signature(model.forward).parameters
    if "txt_seq_lens" in parameters and "additional_t_cond" not in parameters:  # diffusers 0.35
        kwargs["txt_seq_lens"] = [text]
    return model, kwargs


def flux2() -> tuple[Any, dict[str, Any]]:
    model = diffusers.Flux2Transformer2DModel(
        **WIDTH,
        in_channels=4,
        joint_attention_dim=24,
        timestep_guidance_channels=16,
        num_layers=2,
        num_single_layers=2,
        axes_dims_rope=(4, 4, 4, 4),
    )
    image_ids = torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0))
    return model, {
        "hidden_states": randn(2, 16, 4),
        "encoder_hidden_states": randn(2, 5, 24),
        "timestep": torch.tensor([0.3, 0.7]).double(),
        "guidance": torch.tensor([3.0, 3.0]).double(),
        "img_ids": torch.cat((image_ids, torch.zeros(16, 1)), 1).double(),
        "txt_ids": torch.zeros(5, 4).double(),
    }


FAMILIES = {
    "dit": dit,
    "flux": flux,
    "wan": wan,
    "pixart": pixart,
    "ltx": ltx,
    "cogvideox": cogvideox,
    "qwen_image": qwen_image,
}
if hasattr(diffusers, "Flux2Transformer2DModel"):  # since 0.36
    FAMILIES["flux2"] = flux2


def build(family: str, **sizes: Any) -> tuple[Any, dict[str, Any]]:
    """(model, keyword arguments of a call), the same in every call."""
    torch.manual_seed(1)
    model, kwargs = FAMILIES[family](**sizes)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.double(), kwargs
