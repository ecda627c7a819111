"""A spatial-temporal video diffusion transformer (ST-DiT), in the manner of OpenSora and Latte.

The model is written for one device. A stage is a residual block whose self attention mixes the
places of a frame ("space"), the frames ("time") or both ("full"). To run attention over ranks,
replace the function `Attention.attend`.

Shapes: B batch, T frames, H x W pixels, C channels, S places (patches) of a frame, D width,
L text tokens, h heads, d head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wf_backends import SequenceParallel

MIXES = ("space", "time", "full")
TEXT_TOKENS = 256  # bytes

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v, out (batch, tokens, h, d)


@dataclass(frozen=True, kw_only=True)
class VideoDiTConfig:
    """Sizes of the model; `stages` names the dimension that each block mixes."""

    frames: int = 8
    height: int = 32
    width: int = 32
    channels: int = 3
    patch: int = 4
    dim: int = 64
    heads: int = 4
    text_length: int = 48
    stages: Sequence[str] = ("space", "time", "space", "time")

    def __post_init__(self) -> None:
        for name in self.stages:
            if name not in MIXES:
                raise ValueError(f"stages must be of {list(MIXES)}, got {name!r}")
        if self.height % self.patch or self.width % self.patch:
            raise ValueError(
                f"patch must divide height {self.height} and width {self.width}, got {self.patch}"
            )
        if self.dim % (2 * self.heads):
            raise ValueError(f"dim must be a multiple of 2 x heads {self.heads}, got {self.dim}")

    @property
    def places(self) -> int:
        """S, the patches of a frame."""
        return (self.height // self.patch) * (self.width // self.patch)


def local_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense attention on one device; q, k, v, out (batch, tokens, h, d)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


class Attention(nn.Module):
    """Self attention over one dimension of (B, T, S, D), or over both."""

    def __init__(self, dim: int, heads: int, mixes: str) -> None:
        super().__init__()
        self.heads, self.mixes = heads, mixes
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.attend: Attend = local_attention

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, S, D) -> (B, T, S, D)."""
        if self.mixes == "time":
            x = x.transpose(1, 2)  # (B, S, T, D)
        # The dimensions that are not mixed belong to the batch of attention.
        sequences = x.flatten(1, 2) if self.mixes == "full" else x.flatten(0, 1)
        q, k, v = self.qkv(sequences).unflatten(-1, (3, self.heads, -1)).unbind(2)
        out = self.out(self.attend(q, k, v).flatten(2)).reshape(x.shape)
        return out.transpose(1, 2) if self.mixes == "time" else out


class FullAttention(Attention):
    """Self attention over both dimensions."""

    def set_sequence_parallel(self, sp: SequenceParallel) -> None:
        """Attend to the tokens of all ranks of `sp`; wf_deepspeed and wf_colossalai call this."""
        self.attend = sp.attention


class CrossAttention(nn.Module):
    """Attention of every token to the text; needs no messages, as every rank has the text."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.kv, self.out = (
            nn.Linear(dim, dim),
            nn.Linear(dim, 2 * dim),
            nn.Linear(dim, dim),
        )

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        """x (B, T, S, D), text (B, L, D) -> (B, T, S, D)."""
        q = self.q(x.flatten(1, 2)).unflatten(-1, (self.heads, -1))
        k, v = self.kv(text).unflatten(-1, (2, self.heads, -1)).unbind(2)
        return self.out(local_attention(q, k, v).flatten(2)).reshape(x.shape)


class Block(nn.Module):
    """A stage: self attention, cross attention, MLP, modulated by the timestep (adaLN-zero)."""

    def __init__(self, config: VideoDiTConfig, mixes: str) -> None:
        super().__init__()
        dim = config.dim
        self.mixes = mixes
        self.norms = nn.ModuleList(nn.LayerNorm(dim, elementwise_affine=False) for _ in range(2))
        attention_type = FullAttention if mixes == "full" else Attention
        self.attention = attention_type(dim, config.heads, mixes)
        self.cross = CrossAttention(dim, config.heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU("tanh"), nn.Linear(4 * dim, dim))
        self.modulation = _zero_init(nn.Linear(dim, 6 * dim))

    def forward(self, x: Tensor, condition: Tensor, text: Tensor) -> Tensor:
        """x (B, T, S, D), condition (B, D), text (B, L, D) -> (B, T, S, D)."""
        parts = self.modulation(F.silu(condition))[:, None, None].chunk(6, dim=-1)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = parts
        x = x + gate * self.attention(self.norms[0](x) * (1 + scale) + shift)
        x = x + self.cross(x, text)
        return x + mlp_gate * self.mlp(self.norms[1](x) * (1 + mlp_scale) + mlp_shift)


class Final(nn.Module):
    """The output layer: from tokens to the pixels of their patches."""

    def __init__(self, config: VideoDiTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.dim, elementwise_affine=False)
        self.modulation = _zero_init(nn.Linear(config.dim, 2 * config.dim))
        self.out = _zero_init(nn.Linear(config.dim, config.channels * config.patch**2))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """x (B, T, S, D), condition (B, D) -> (B, T, S, patch^2 C)."""
        shift, scale = self.modulation(F.silu(condition))[:, None, None].chunk(2, dim=-1)
        return self.out(self.norm(x) * (1 + scale) + shift)


class VideoDiT(nn.Module):
    """Predicts the velocity of a noisy video from its time and a text (flow matching)."""

    def __init__(self, config: VideoDiTConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.dim
        self.patch_linear = nn.Linear(config.channels * config.patch**2, dim)
        self.text_embedding = nn.Embedding(TEXT_TOKENS, dim)
        self.time_mlp = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(Block(config, mixes) for mixes in config.stages)
        self.final = Final(config)
        self.register_buffer("frame_embedding", _sinusoidal(torch.arange(config.frames), dim))
        self.register_buffer("place_embedding", _sinusoidal(torch.arange(config.places), dim))
        self.register_buffer(
            "text_position_embedding", _sinusoidal(torch.arange(config.text_length), dim)
        )

    def forward(self, video: Tensor, times: Tensor, text: Tensor) -> Tensor:
        """video (B, T, H, W, C), times (B,) in [0, 1], text (B, L) bytes -> (B, T, H, W, C)."""
        x = self.patch_linear(to_patches(video, self.config.patch))
        x = x + self.frame_embedding[:, None] + self.place_embedding
        condition = self.time_mlp(_sinusoidal(1000 * times, self.config.dim).to(x.dtype))
        text = self.text_embedding(text) + self.text_position_embedding
        for block in self.blocks:
            x = block(x, condition, text)
        return from_patches(self.final(x, condition), self.config)


def to_patches(video: Tensor, patch: int) -> Tensor:
    """(B, T, H, W, C) -> (B, T, S, patch^2 C)."""
    x = video.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # B T H/p p W/p p C
    return x.transpose(3, 4).flatten(4).flatten(2, 3)


def from_patches(x: Tensor, config: VideoDiTConfig) -> Tensor:
    """The inverse of `to_patches`: (B, T, S, patch^2 C) -> (B, T, H, W, C)."""
    patch = config.patch
    rows = config.height // patch
    x = x.unflatten(3, (patch, patch, config.channels)).unflatten(2, (rows, -1))
    return x.transpose(3, 4).flatten(4, 5).flatten(2, 3)


def _sinusoidal(positions: Tensor, dim: int) -> Tensor:
    """Sinusoidal embedding: positions (n,) -> (n, dim)."""
    indices = torch.arange(dim // 2, device=positions.device)
    frequencies = torch.exp(-math.log(10000) * indices / (dim // 2))
    angles = positions[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


def _zero_init(layer: nn.Linear) -> nn.Linear:
    """Zero weight and bias (adaLN-zero: each gated branch starts as the identity)."""
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
