"""Tiny random transformers of diffusers for images, and the keyword arguments of a call."""

from __future__ import annotations

import inspect
from typing import Any

import diffusers
import torch
from torch import Tensor

WIDTH = {"num_attention_heads": 2, "attention_head_dim": 16}
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


def sd3(dual_attention_layers: tuple[int, ...] = (0,)) -> tuple[Any, dict[str, Any]]:
    """As Stable Diffusion 3.5: a second attention, of the image alone, in the first block."""
    model = diffusers.SD3Transformer2DModel(
        **WIDTH,
        sample_size=6,
        in_channels=2,
        out_channels=2,
        num_layers=3,
        joint_attention_dim=20,
        caption_projection_dim=32,
        pooled_projection_dim=12,
        pos_embed_max_size=6,
        dual_attention_layers=dual_attention_layers,
        qk_norm="rms_norm",
    )
    return model, {
        "hidden_states": randn(2, 2, 6, 6),
        "encoder_hidden_states": randn(2, 9, 20),
        "pooled_projections": randn(2, 12),
        "timestep": torch.tensor([3, 5]),
    }


def auraflow() -> tuple[Any, dict[str, Any]]:
    model = diffusers.AuraFlowTransformer2DModel(
        **WIDTH,
        sample_size=6,
        in_channels=2,
        out_channels=2,
        num_mmdit_layers=1,
        num_single_dit_layers=2,
        joint_attention_dim=20,
        caption_projection_dim=32,
        pos_embed_max_size=9,
    )
    return model, {
        "hidden_states": randn(2, 2, 6, 6),
        "encoder_hidden_states": randn(2, 5, 20),
        "timestep": torch.tensor([0.3, 0.5]).double(),
    }


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


def like_flux(name: str, **config: Any) -> Any:
    """A function that builds a model of the class, and the call of a Flux."""

    def build() -> tuple[Any, dict[str, Any]]:
        model = getattr(diffusers, name)(**WIDTH, **FLUX, **config, num_layers=1)
        _, kwargs = flux()
        del kwargs["pooled_projections"]
        return model, kwargs

    return build


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


def chroma() -> tuple[Any, dict[str, Any]]:
    model = diffusers.ChromaTransformer2DModel(
        **WIDTH,
        **FLUX,
        num_layers=2,
        axes_dims_rope=(4, 6, 6),
        approximator_num_channels=16,
        approximator_hidden_dim=12,
        approximator_layers=1,
    )
    _, kwargs = flux()
    del kwargs["pooled_projections"]
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


def qwen_image_edit(**config: Any) -> tuple[Any, dict[str, Any]]:
    """4 x 4 of image, 2 x 2 of a condition at timestep 0; 5 tokens of text, and 2 of padding."""
    model = diffusers.QwenImageTransformer2DModel(
        **WIDTH,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        joint_attention_dim=24,
        axes_dims_rope=(4, 6, 6),
        **config or {"zero_cond_t": True},
    )
    return model, {
        "hidden_states": randn(2, 20, 4),
        "encoder_hidden_states": randn(2, 7, 24),
        "encoder_hidden_states_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0]] * 2),
        "timestep": torch.tensor([0.3, 0.6]).double(),
        "img_shapes": [[(1, 4, 4), (1, 2, 2)]] * 2,
    }


def qwen_image_layered() -> tuple[Any, dict[str, Any]]:
    """Two layers, and a condition."""
    model, kwargs = qwen_image_edit(use_layer3d_rope=True, use_additional_t_cond=True)
    layers = {"img_shapes": [[(1, 2, 4), (1, 2, 4), (1, 2, 2)]] * 2}
    return model, kwargs | layers | {"additional_t_cond": torch.tensor([0, 1])}


def hunyuan_image() -> tuple[Any, dict[str, Any]]:
    """4 tokens of text, 2 of glyphs, and padding of both; 4 x 4 of image."""
    model = diffusers.HunyuanImageTransformer2DModel(
        **WIDTH,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=(1, 1),
        text_embed_dim=20,
        text_embed_2_dim=12,
        rope_axes_dim=(8, 8),
    )
    return model, {
        "hidden_states": randn(2, 4, 4, 4),
        "timestep": torch.tensor([3, 5]).double(),
        "encoder_hidden_states": randn(2, 6, 20),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]] * 2),
        "encoder_hidden_states_2": randn(2, 3, 12),
        "encoder_attention_mask_2": torch.tensor([[1, 1, 0]] * 2),
    }


def z_image() -> tuple[Any, dict[str, Any]]:
    model = diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=20,
        axes_dims=[4, 6, 6],
        axes_lens=[128, 16, 16],
    )
    return model, {
        "x": [randn(4, 1, 8, 8), randn(4, 1, 8, 8) + 1],
        "t": torch.tensor([0.3, 0.5]).double(),
        "cap_feats": [randn(5, 20), randn(7, 20)],
    }


def lumina2() -> tuple[Any, dict[str, Any]]:
    """5 tokens of text, and 2 of padding; 4 x 4 of image."""
    model = diffusers.Lumina2Transformer2DModel(
        in_channels=4,
        out_channels=4,
        hidden_size=32,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        axes_dim_rope=(4, 6, 6),
        axes_lens=(64, 16, 16),
        cap_feat_dim=20,
    )
    return model, {
        "hidden_states": randn(2, 4, 8, 8),
        "timestep": torch.tensor([0.3, 0.5]).double(),
        "encoder_hidden_states": randn(2, 7, 20),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0]] * 2),
    }


def called_with(family: Any, **arguments: Any) -> Any:
    """A function that builds the family's model, and a call of it with these arguments."""

    def build() -> tuple[Any, dict[str, Any]]:
        model, kwargs = family()
        return model, kwargs | arguments

    return build
