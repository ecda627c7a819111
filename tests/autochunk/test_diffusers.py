"""Parts of diffusers' pipelines in slices: VAEs, and the models of a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.autochunk.helpers import ANY_SLOWDOWN, measured_peak, profiled_peak, relative_error
from wf_backends.autochunk import autochunk

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")

BLOCKS_3D = {"latent_channels": 4, "block_out_channels": (8, 8, 8, 8), "layers_per_block": 1}

# name -> (class, config, shape of latents)
VAES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "stable_diffusion": (
        "AutoencoderKL",
        {
            "block_out_channels": (16, 32),
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "norm_num_groups": 8,
        },
        (1, 4, 32, 32),
    ),
    "deep_compression": (
        "AutoencoderDC",
        {
            "latent_channels": 4,
            "attention_head_dim": 2,
            "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "encoder_block_out_channels": (8, 8),
            "decoder_block_out_channels": (8, 8),
            "encoder_qkv_multiscales": ((), (5,)),
            "decoder_qkv_multiscales": ((), (5,)),
            "encoder_layers_per_block": (1, 1),
            "decoder_layers_per_block": (1, 1),
            "downsample_block_type": "conv",
            "upsample_block_type": "interpolate",
            "decoder_norm_types": "rms_norm",
            "decoder_act_fns": "silu",
        },
        (1, 4, 32, 32),
    ),
    "wan": (  # one latent frame after another, with a list of caches that each call fills
        "AutoencoderKLWan",
        {
            "base_dim": 8,
            "z_dim": 4,
            "dim_mult": [1, 1, 1, 1],
            "num_res_blocks": 1,
            "temperal_downsample": [False, True, True],
            "latents_mean": [0.0] * 4,
            "latents_std": [1.0] * 4,
        },
        (1, 4, 2, 8, 8),
    ),
    "cogvideox": (
        "AutoencoderKLCogVideoX",
        {
            "down_block_types": ("CogVideoXDownBlock3D",) * 4,
            "up_block_types": ("CogVideoXUpBlock3D",) * 4,
            "norm_num_groups": 2,
            **BLOCKS_3D,
        },
        (1, 4, 4, 8, 8),
    ),
    "ltx": (
        "AutoencoderKLLTXVideo",
        {
            "decoder_block_out_channels": (8, 8, 8, 8),
            "decoder_layers_per_block": (1, 1, 1, 1, 1),
            "patch_size": 1,
            **(BLOCKS_3D | {"layers_per_block": (1, 1, 1, 1, 1)}),
        },
        (1, 4, 3, 8, 8),
    ),
}


class Decode(nn.Module):
    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.vae: Any = vae

    def forward(self, latents: Tensor) -> Tensor:
        return self.vae.decode(latents).sample


@pytest.mark.parametrize("name", VAES)
@torch.no_grad()
def test_a_vae_decodes_in_slices(name: str) -> None:
    torch.manual_seed(0)
    of_name, config, shape = VAES[name]
    decode = Decode(getattr(diffusers, of_name)(**config)).double().eval()
    latents = torch.randn(shape, dtype=torch.float64)
    chunked = autochunk(decode, (latents,), max_slowdown=ANY_SLOWDOWN)
    assert chunked.plan.peak < 0.9 * chunked.plan.peak_before
    inputs = {"latents": latents}
    assert chunked.plan.peak == pytest.approx(measured_peak(chunked, inputs), rel=0.05)
    assert relative_error(chunked(latents), decode(latents)) < 1e-12


@torch.no_grad()
def test_a_compiled_vae_needs_what_was_planned() -> None:
    """inductor computed eight slices at once where none reads what another one writes.

    It lowers the operator that writes slices another way once it has met it: then the images were
    wrong.
    """
    mlp, x = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)).eval(), torch.ones(256, 8)
    torch.compile(autochunk(mlp, (x,), max_slowdown=ANY_SLOWDOWN))(x)
    of_name, config, (batch, channels, *_) = VAES["stable_diffusion"]
    vae = getattr(diffusers, of_name)(**config).to(memory_format=torch.channels_last)
    decode = Decode(vae).eval()
    latents = torch.randn(batch, channels, 64, 64).to(memory_format=torch.channels_last)
    chunked = autochunk(decode, (latents,), max_memory=0.65, max_slowdown=ANY_SLOWDOWN)
    compiled = torch.compile(chunked)
    torch.testing.assert_close(compiled(latents), decode(latents), rtol=1e-4, atol=1e-4)
    # on CPUs with AVX2 alone oneDNN copies inputs of convolutions, in eager slices too
    in_slices = max(chunked.plan.peak, profiled_peak(lambda: chunked(latents)))
    assert profiled_peak(lambda: compiled(latents)) <= 1.05 * in_slices


@torch.no_grad()
def test_a_pipeline_makes_the_images_of_its_models() -> None:
    torch.manual_seed(0)
    of_vae, config, latents = VAES["stable_diffusion"]
    unet = diffusers.UNet2DConditionModel(
        sample_size=latents[-1],
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=16,
        attention_head_dim=2,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    without_text = ("text_encoder", "tokenizer", "safety_checker", "feature_extractor")
    pipe = diffusers.StableDiffusionPipeline(
        vae=getattr(diffusers, of_vae)(**config).double().eval(),
        unet=unet.double().eval(),
        scheduler=diffusers.DDIMScheduler(clip_sample=False, steps_offset=1),
        requires_safety_checker=False,
        **dict.fromkeys(without_text),
    )
    pipe.set_progress_bar_config(disable=True)

    def images() -> Tensor:
        texts = torch.linspace(-1, 1, 2 * 7 * 16, dtype=torch.float64).view(2, 1, 7, 16)
        draws = torch.Generator().manual_seed(1)
        inputs = {"prompt_embeds": texts[0], "negative_prompt_embeds": texts[1]}
        return pipe(**inputs, num_inference_steps=2, generator=draws, output_type="pt").images

    expected = images()
    inputs = {
        "sample": torch.randn(2, *latents[1:], dtype=torch.float64),
        "timestep": torch.tensor(1),
        "encoder_hidden_states": torch.randn(2, 7, 16, dtype=torch.float64),
        "return_dict": False,
    }
    pipe.unet = autochunk(pipe.unet, kwargs=inputs, max_slowdown=ANY_SLOWDOWN)
    pipe.vae.decoder = autochunk(
        pipe.vae.decoder, (inputs["sample"][:1],), max_slowdown=ANY_SLOWDOWN
    )
    for plan in (pipe.unet.plan, pipe.vae.decoder.plan):
        assert plan.peak < 0.9 * plan.peak_before
    assert relative_error(images(), expected) < 1e-12
