"""The models of benchmarks/autochunk.py with random weights, what people do by hand, and what a run
needs."""

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

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "autochunk"))
from evoformer import EvoformerBlock, OuterProductMean

from wf_backends.graph import StorageTracker

MIB = 1 << 20
WIDE = {"width": 1024, "heads": 16}
Made = tuple[nn.Module, dict[str, Any]]  # a model and the keyword arguments of a call
BLOCKS = {  # a UNet of three resolutions with attention at the two lower ones
    "block_out_channels": (64, 128, 256),
    "layers_per_block": 1,
    "norm_num_groups": 32,
}


class BySlices(nn.Module):
    """A module called on slices of its first argument along dimension 1; others are given whole.

    With `count` slices it is ALST's tiled MLP, with slices of `rows` OpenFold's chunk_layer.
    """

    def __init__(self, inner: nn.Module, count: int = 0, rows: int = 0) -> None:
        super().__init__()
        self.inner, self.count, self.rows = inner, count, rows

    def forward(self, x: Tensor, *whole: Any) -> Tensor:
        rows = self.rows or -(-x.shape[1] // self.count)
        out = torch.empty_like(x)
        for lo in range(0, x.shape[1], rows):
            out[:, lo : lo + rows] = self.inner(x[:, lo : lo + rows], *whole)
        return out


class OuterBySlices(nn.Module):
    """An outer product mean, 4 residues of the left side at a time."""

    def __init__(self, inner: OuterProductMean) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, msa: Tensor) -> Tensor:
        x = self.inner.norm(msa)
        left, right = self.inner.left(x), self.inner.right(x)
        parts = []
        for some in left.split(4, dim=2):
            outer = torch.einsum("bsic,bsjd->bijcd", some, right)
            parts.append(self.inner.out(outer.flatten(-2) / msa.shape[1]))
        return torch.cat(parts, 1)


def tile_mlps(model: nn.Module) -> None:
    """Every MLP in 8 tiles of the sequence."""
    _wrap(model, ("mlp",), lambda inner: BySlices(inner, count=8))


def chunk_layers(model: nn.Module) -> None:
    """Attentions, transitions and outer product of an Evoformer block by 4 rows, as AlphaFold."""
    _wrap(model, ("outer",), OuterBySlices)
    _wrap(
        model,
        ("attention", "msa_transition", "pair_transition"),
        lambda inner: BySlices(inner, rows=4),
    )


def _wrap(model: nn.Module, names: tuple[str, ...], wrap: Callable[..., nn.Module]) -> None:
    for owner in list(model.modules()):
        for name, inner in list(owner.named_children()):
            if name in names:
                setattr(owner, name, wrap(inner))


def implementation(fused: bool) -> dict[str, Any]:
    return {"attn_implementation": "sdpa" if fused else "eager"}


def gpt2(tokens: int, fused: bool, width: int = 256, layers: int = 2, heads: int = 8) -> Made:
    config = GPT2Config(
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        vocab_size=1000,
        n_positions=tokens,
        **implementation(fused),
    )
    model = GPT2Model(config)
    blocks: Any = model.h if fused else ()
    for block in blocks:  # the causal mask of all positions, which eager attention alone reads
        block.attn._buffers.pop("bias", None)  # transformers 5 has none
    return model, {"input_ids": torch.randint(1000, (1, tokens)), "use_cache": False}


def llama(
    tokens: int,
    fused: bool,
    width: int = 256,
    layers: int = 2,
    heads: int = 8,
    vocabulary: int = 1000,
    queries_per_key: int = 2,
) -> Made:
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // queries_per_key,
        vocab_size=vocabulary,
        **implementation(fused),
    )
    ids = torch.randint(vocabulary, (1, tokens))
    return LlamaForCausalLM(config), {"input_ids": ids, "use_cache": False, "logits_to_keep": 1}


def vit(pixels: int, fused: bool, layers: int = 2) -> Made:
    """ViT-large with fewer layers."""
    config = ViTConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=16,
        image_size=pixels,
        **implementation(fused),
    )
    return ViTModel(config, add_pooling_layer=False), {
        "pixel_values": torch.randn(1, 3, pixels, pixels)
    }


def evoformer(residues: int, fused: bool) -> Made:
    """c_m 256, c_z 128, an alignment of 32 sequences."""
    pair = torch.randn(1, residues, residues, 128)
    return EvoformerBlock(fused=fused), {"msa": torch.randn(1, 32, residues, 256), "pair": pair}


def unet(pixels: int, fused: bool) -> Made:
    from diffusers.models.unets.unet_2d import UNet2DModel

    model = UNet2DModel(
        sample_size=pixels,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=32,
        **BLOCKS,
    )
    _set_attention(model, fused)
    return model, _image(3, pixels)


def unet_condition(pixels: int, fused: bool) -> Made:
    """Stable Diffusion's form: cross attention to 77 tokens of text."""
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    kinds: dict[str, Any] = {
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    }
    model = UNet2DConditionModel(
        sample_size=pixels,
        cross_attention_dim=256,
        attention_head_dim=8,
        **kinds,
        **BLOCKS,
    )
    _set_attention(model, fused)
    return model, _image(4, pixels) | {"encoder_hidden_states": torch.randn(1, 77, 256)}


def unet_default(pixels: int, fused: bool) -> Made:
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


def made(
    make: Callable[..., Made], *args: Any, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Made:
    """The model in evaluation mode, with the same weights and inputs every time."""
    torch.manual_seed(0)
    with torch.device(device):
        model, kwargs = make(*args)
    if dtype is not torch.float32:  # fake tensors cannot be cast
        model, kwargs = model.to(dtype), in_dtype(kwargs, dtype)
    return model.eval(), kwargs


def in_dtype(kwargs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The arguments with the floating-point tensors among them in that dtype."""

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() else x

    return pytree.tree_map_only(Tensor, cast, kwargs)


def measured_peak(model: nn.Module, kwargs: dict[str, Any]) -> int:
    """Live bytes of a real run beyond weights and inputs."""
    inputs = [v for v in kwargs.values() if isinstance(v, torch.Tensor)]
    gc.collect()
    with torch.no_grad(), StorageTracker((*model.parameters(), *model.buffers(), *inputs)) as seen:
        model(**kwargs)
    return seen.peak


@dataclass(frozen=True)
class DevicePeak:
    """The most bytes of the GPU that a run took beyond what was there before: as operators asked
    for them, and as torch's allocator gave them, in blocks."""

    requested: int
    allocated: int


def device_peak(run: Callable[[], object]) -> DevicePeak:
    """Of a run after one that warms up: libraries keep the workspaces of their first calls."""
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
    return (x for x in pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor))


def mib(count: int) -> str:
    return f"{count / MIB:.2f}"
