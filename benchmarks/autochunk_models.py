"""The models of benchmarks/autochunk.py, changes that people make by hand, the memory of a run."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.models.gpt2 import GPT2Config, GPT2Model
from transformers.models.llama import LlamaConfig, LlamaForCausalLM
from transformers.models.vit import ViTConfig, ViTModel

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "fold"))
from evoformer import EvoformerBlock, OuterProductMean

from wf_backends.autochunk.graph import StorageTracker

MIB = 1 << 20
WIDE = {"width": 1024, "heads": 16}
ModelAndInputs = tuple[nn.Module, dict[str, Any]]  # inputs: the keyword arguments of a call
UNET_SIZES = {  # a UNet of three resolutions with attention at the two lower ones
    "block_out_channels": (64, 128, 256),
    "layers_per_block": 1,
    "norm_num_groups": 32,
}


class BySlices(nn.Module):
    """Calls a module on slices of its first argument along dimension 1; other arguments stay whole.

    `num_slices` slices as in ALST's tiled MLP, or slices of `rows` as in OpenFold's chunk_layer.
    """

    def __init__(self, inner: nn.Module, num_slices: int = 0, rows: int = 0) -> None:
        super().__init__()
        self.inner, self.num_slices, self.rows = inner, num_slices, rows

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        rows = self.rows or -(-x.shape[1] // self.num_slices)
        out = torch.empty_like(x)
        for start in range(0, x.shape[1], rows):
            stop = start + rows
            out[:, start:stop] = self.inner(x[:, start:stop], *others)
        return out


class OuterBySlices(nn.Module):
    """Computes an outer product mean for 4 residues of its left side at a time."""

    def __init__(self, inner: OuterProductMean) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, msa: Tensor) -> Tensor:
        x = self.inner.norm(msa)
        left, right = self.inner.left(x), self.inner.right(x)
        parts = []
        for left_slice in left.split(4, dim=2):
            outer = torch.einsum("bsic,bsjd->bijcd", left_slice, right)
            parts.append(self.inner.out(outer.flatten(-2) / msa.shape[1]))
        return torch.cat(parts, 1)


def tile_mlps(model: nn.Module) -> None:
    """Compute every MLP in 8 tiles of the sequence."""
    _wrap(model, ("mlp",), lambda inner: BySlices(inner, num_slices=8))


def chunk_layers(model: nn.Module) -> None:
    """Compute most modules of an Evoformer block for 4 rows at a time, as AlphaFold does."""
    names = ("attention", "msa_transition", "pair_transition")
    _wrap(model, names, lambda inner: BySlices(inner, rows=4))
    _wrap(model, ("outer",), OuterBySlices)


def _wrap(model: nn.Module, names: tuple[str, ...], wrap: Callable[..., nn.Module]) -> None:
    """Replace every submodule with one of these names by `wrap(submodule)`."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in names:
                setattr(parent, name, wrap(child))


def attention_implementation(fused: bool) -> dict[str, Any]:
    return {"attn_implementation": "sdpa" if fused else "eager"}


def gpt2(
    tokens: int, fused: bool, width: int = 256, layers: int = 2, heads: int = 8
) -> ModelAndInputs:
    config = GPT2Config(
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        vocab_size=1000,
        n_positions=tokens,
        **attention_implementation(fused),
    )
    model = GPT2Model(config)
    if fused:  # only eager attention reads the causal mask of all positions
        blocks: Any = model.h
        for block in blocks:
            block.attn._buffers.pop("bias", None)  # transformers 5 has no such buffer
    return model, {"input_ids": torch.randint(1000, (1, tokens)), "use_cache": False}


def llama(
    tokens: int,
    fused: bool,
    width: int = 256,
    layers: int = 2,
    heads: int = 8,
    vocabulary: int = 1000,
    queries_per_key: int = 2,
) -> ModelAndInputs:
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // queries_per_key,
        vocab_size=vocabulary,
        **attention_implementation(fused),
    )
    ids = torch.randint(vocabulary, (1, tokens))
    return LlamaForCausalLM(config), {"input_ids": ids, "use_cache": False, "logits_to_keep": 1}


def vit(pixels: int, fused: bool, layers: int = 2) -> ModelAndInputs:
    """ViT-large with fewer layers."""
    config = ViTConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=16,
        image_size=pixels,
        **attention_implementation(fused),
    )
    return ViTModel(config, add_pooling_layer=False), {
        "pixel_values": torch.randn(1, 3, pixels, pixels)
    }


def evoformer(residues: int, fused: bool) -> ModelAndInputs:
    """c_m 256, c_z 128, an alignment of 32 sequences."""
    pair = torch.randn(1, residues, residues, 128)
    return EvoformerBlock(fused=fused), {"msa": torch.randn(1, 32, residues, 256), "pair": pair}


def unet(pixels: int, fused: bool) -> ModelAndInputs:
    from diffusers.models.unets.unet_2d import UNet2DModel

    model = UNet2DModel(
        sample_size=pixels,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=32,
        **UNET_SIZES,
    )
    _set_attention(model, fused)
    return model, _image(3, pixels)


def unet_condition(pixels: int, fused: bool) -> ModelAndInputs:
    """Stable Diffusion's form: cross attention to 77 tokens of text."""
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    block_types: dict[str, Any] = {
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    }
    model = UNet2DConditionModel(
        sample_size=pixels,
        cross_attention_dim=256,
        attention_head_dim=8,
        **block_types,
        **UNET_SIZES,
    )
    _set_attention(model, fused)
    return model, _image(4, pixels) | {"encoder_hidden_states": torch.randn(1, 77, 256)}


class Decoder(nn.Module):
    """The decoder of a VAE, whose `forward` alone encodes and decodes."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.vae: Any = vae

    def forward(self, latents: Tensor) -> Tensor:
        return self.vae.decode(latents).sample


def vae(pixels: int, fused: bool) -> ModelAndInputs:
    """Stable Diffusion's decoder of latents, in its size."""
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(128, 256, 512, 512),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
    )
    _set_attention(model, fused)
    return Decoder(model), {"latents": torch.randn(1, 4, pixels // 8, pixels // 8)}


def unet_default(pixels: int, fused: bool) -> ModelAndInputs:
    """diffusers' UNet2D with its default sizes (224, 448, 672, 896 channels)."""
    from diffusers.models.unets.unet_2d import UNet2DModel

    model = UNet2DModel(sample_size=pixels)
    _set_attention(model, fused)
    return model, _image(3, pixels)


def _set_attention(model: nn.Module, fused: bool) -> None:
    from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0

    processor: Any = AttnProcessor2_0() if fused else AttnProcessor()
    for module in model.modules():
        if isinstance(module, Attention):
            module.set_processor(processor)


def _image(channels: int, pixels: int) -> dict[str, Any]:
    return {
        "sample": torch.randn(1, channels, pixels, pixels),
        "timestep": torch.tensor(10),
        "return_dict": False,
    }


def build(
    make: Callable[..., ModelAndInputs],
    *args: Any,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> ModelAndInputs:
    """`make(*args)` with the model in evaluation mode; the same weights and inputs every time."""
    torch.manual_seed(0)
    with torch.device(device):
        model, kwargs = make(*args)
    if dtype is not torch.float32:  # not with fake tensors, which cannot be cast
        model, kwargs = model.to(dtype), in_dtype(kwargs, dtype)
    return model.eval(), kwargs


def in_dtype(kwargs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The arguments with floating-point tensors cast to `dtype`."""

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() else x

    return pytree.tree_map_only(Tensor, cast, kwargs)


def measured_peak(model: nn.Module, kwargs: dict[str, Any]) -> int:
    """Largest live bytes of a real run, without weights and inputs."""
    inputs = [v for v in kwargs.values() if isinstance(v, torch.Tensor)]
    gc.collect()
    excluded = (*model.parameters(), *model.buffers(), *inputs)
    with torch.no_grad(), StorageTracker(excluded) as tracker:
        model(**kwargs)
    return tracker.peak


def profiled_peak(run: Callable[[], object]) -> int:
    """Largest live bytes that torch's profiler sees in a run, also of buffers of compiled code."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        run()
    results: Any = profiler.profiler
    live = peak = 0
    for event in results.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


@dataclass(frozen=True)
class DevicePeak:
    """Peak bytes of the GPU in a run, minus the bytes that were allocated before it."""

    requested: int  # by operators
    allocated: int  # in blocks of torch's allocator


def device_peak(run: Callable[[], object]) -> DevicePeak:
    """The peak of a run after a warm-up, in which libraries allocate workspaces that they keep."""
    names = ("requested_bytes.all", "allocated_bytes.all")
    run()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    run()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    return DevicePeak(*(after[f"{name}.peak"] - before[f"{name}.current"] for name in names))


def tensors(outputs: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested outputs or inputs."""
    return (x for x in pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor))


def mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.2f}"
