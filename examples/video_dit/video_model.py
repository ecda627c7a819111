"""A spatial-temporal video diffusion transformer (ST-DiT), in the manner of OpenSora and Latte.

Nothing here knows of ranks. Stages are residual blocks that mix places ("space"), frames ("time")
or both ("full"); `Attention.attend` is the one door where full attention may be replaced.

Shapes: B batch, T frames, S places of a frame, D width, L text tokens, h heads, d head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wf_backends import SequenceParallel

MIXES = ("space", "time", "full")
TEXT_TOKENS = 256  # bytes

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v (b, s, h, d) -> (b, s, h, d)


@dataclass(frozen=True, kw_only=True)
class VideoDiTConfig:
    """Sizes of the model; `stages` names what its blocks mix, in order."""

    frames: int = 8
    height: int = 32
    width: int = 32
    channels: int = 3
    patch: int = 4
    dim: int = 64
    heads: int = 4
    text_length: int = 48
    stages: tuple[str, ...] = ("space", "time", "space", "time")

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


def attend_here(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one device."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


class Attention(nn.Module):
    """Self attention over one dimension of (B, T, S, D), or over both."""

    def __init__(self, dim: int, heads: int, mixes: str) -> None:
        super().__init__()
        self.heads, self.mixes = heads, mixes
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.attend: Attend = attend_here

    def forward(self, x: Tensor) -> Tensor:
        turned = x.transpose(1, 2) if self.mixes == "time" else x
        rows = turned.flatten(1, 2) if self.mixes == "full" else turned.flatten(0, 1)
        q, k, v = self.qkv(rows).unflatten(-1, (3, self.heads, -1)).unbind(2)
        out = self.out(self.attend(q, k, v).flatten(2)).reshape(turned.shape)
        return out.transpose(1, 2) if self.mixes == "time" else out


class FullAttention(Attention):
    """Self attention over both dimensions."""

    def set_sequence_parallel(self, sp: SequenceParallel) -> None:
        """Attend over the ranks of `sp`; wf_deepspeed and wf_colossalai call it."""
        self.attend = sp.attention


class CrossAttention(nn.Module):
    """Every token looks at the text: local, however the tokens are spread."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.kv, self.out = (
            nn.Linear(dim, dim),
            nn.Linear(dim, 2 * dim),
            nn.Linear(dim, dim),
        )

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        q = self.q(x.flatten(1, 2)).unflatten(-1, (self.heads, -1))
        k, v = self.kv(text).unflatten(-1, (2, self.heads, -1)).unbind(2)
        return self.out(attend_here(q, k, v).flatten(2)).reshape(x.shape)


class Block(nn.Module):
    """A stage: attention, cross attention and MLP, modulated by the timestep (adaLN-zero)."""

    def __init__(self, config: VideoDiTConfig, mixes: str) -> None:
        super().__init__()
        dim = config.dim
        self.mixes = mixes
        self.norms = nn.ModuleList(nn.LayerNorm(dim, elementwise_affine=False) for _ in range(2))
        kind = FullAttention if mixes == "full" else Attention
        self.attention = kind(dim, config.heads, mixes)
        self.cross = CrossAttention(dim, config.heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU("tanh"), nn.Linear(4 * dim, dim))
        self.modulation = _zero(nn.Linear(dim, 6 * dim))

    def forward(self, x: Tensor, condition: Tensor, text: Tensor) -> Tensor:
        """x (B, T, S, D), condition (B, D), text (B, L, D) -> (B, T, S, D)."""
        parts = self.modulation(F.silu(condition))[:, None, None].chunk(6, dim=-1)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = parts
        x = x + gate * self.attention(self.norms[0](x) * (1 + scale) + shift)
        x = x + self.cross(x, text)
        return x + mlp_gate * self.mlp(self.norms[1](x) * (1 + mlp_scale) + mlp_shift)


class Final(nn.Module):
    """Tokens to the pixels of their patches."""

    def __init__(self, config: VideoDiTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.dim, elementwise_affine=False)
        self.modulation = _zero(nn.Linear(config.dim, 2 * config.dim))
        self.out = _zero(nn.Linear(config.dim, config.channels * config.patch**2))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.modulation(F.silu(condition))[:, None, None].chunk(2, dim=-1)
        return self.out(self.norm(x) * (1 + scale) + shift)


class VideoDiT(nn.Module):
    """Predicts the velocity of a noisy video, given its time and a text."""

    def __init__(self, config: VideoDiTConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.dim
        self.patches = nn.Linear(config.channels * config.patch**2, dim)
        self.text = nn.Embedding(TEXT_TOKENS, dim)
        self.time = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(Block(config, mixes) for mixes in config.stages)
        self.final = Final(config)
        self.register_buffer("frame_places", _waves(torch.arange(config.frames), dim))
        self.register_buffer("patch_places", _waves(torch.arange(config.places), dim))
        self.register_buffer("text_places", _waves(torch.arange(config.text_length), dim))

    def forward(self, video: Tensor, times: Tensor, text: Tensor) -> Tensor:
        """video (B, T, H, W, C), times (B,) in [0, 1], text (B, L) bytes -> as video."""
        x = self.patches(to_patches(video, self.config.patch))
        x = x + self.frame_places[:, None] + self.patch_places
        condition = self.time(_waves(1000 * times, self.config.dim).to(x.dtype))
        words = self.text(text) + self.text_places
        for block in self.blocks:
            x = block(x, condition, words)
        return from_patches(self.final(x, condition), self.config)


def to_patches(video: Tensor, patch: int) -> Tensor:
    """(B, T, H, W, C) -> (B, T, S, C patch^2)."""
    cut = video.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # B T h p w q C
    return cut.transpose(3, 4).flatten(4).flatten(2, 3)


def from_patches(x: Tensor, config: VideoDiTConfig) -> Tensor:
    """The inverse of `to_patches`."""
    rows, patch = config.height // config.patch, config.patch
    cut = x.unflatten(3, (patch, patch, config.channels)).unflatten(2, (rows, -1))
    return cut.transpose(3, 4).flatten(4, 5).flatten(2, 3)


def _waves(positions: Tensor, dim: int) -> Tensor:
    """(n,) -> (n, dim): sines and cosines."""
    places = torch.arange(dim // 2, device=positions.device)
    rates = torch.exp(-math.log(10000) * places / (dim // 2))
    angles = positions[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


def _zero(layer: nn.Linear) -> nn.Linear:
    """adaLN-zero: a block starts as the identity."""
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
