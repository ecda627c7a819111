"""The table of layers that mix tokens by a convolution and a recurrence: how ranks share them.

A row says which channels of a layer are one rank's, and which of its parameters. The layer's own
code then runs on these (mixing.py).

Shapes: I channels, N state size, H heads of p channels, G groups of heads that share B and C.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from wf_transformers.families.delta_rule import (
    BAILING_HYBRID,
    KIMI_LINEAR,
    OLMO_HYBRID,
    QWEN3_5,
    QWEN3_NEXT,
)
from wf_transformers.families.shares import Keep, Mixer, Share, divide, part, rows, spans


class Mamba(Mixer):
    """arXiv 2312.00752: every channel has a state of its own; dt, B, C are sums over all."""

    summed = ("x_proj",)
    whole = ("dt_layernorm.weight", "b_layernorm.weight", "c_layernorm.weight")

    def share(self, layer: Any, rank: int, size: int) -> Share:
        channels = layer.intermediate_size
        mine = part("channels", channels, rank, size)
        names = ("conv1d.weight", "conv1d.bias", "dt_proj.weight", "dt_proj.bias", "A_log", "D")
        cuts = rows(names, mine) | {"x_proj.weight": (1, mine)}
        attributes = {"intermediate_size": len(mine), "conv1d.groups": len(mine)}
        return Share(torch.cat([mine, channels + mine]), mine, cuts, attributes)


class Zamba(Mixer):
    """Heads that are a Mamba each; the projection's features are (channel, gate) pairs."""

    def share(self, layer: Any, rank: int, size: int) -> Share:
        heads = part("n_mamba_heads", layer.n_mamba_heads, rank, size)
        mine = part("channels", layer.intermediate_size, rank, size)
        by_head = ("x_proj_weight", "dt_proj_weight", "dt_proj_bias", "A_log", "D")
        cuts = rows(by_head, heads) | rows(("conv1d.weight", "conv1d.bias"), mine)
        pairs = part("channels", 2 * layer.intermediate_size, rank, size)
        sizes = {"intermediate_size": len(mine), "conv1d.groups": len(mine)}
        return Share(pairs, mine, cuts, sizes | {"n_mamba_heads": len(heads)})


class Mamba2(Mixer):
    """arXiv 2405.21060: heads, and groups of heads that share B and C. Its gate stays."""

    def share(self, layer: Any, rank: int, size: int) -> Share:
        heads, groups = _heads_and_groups(layer, rank, size)
        channels, states = layer.intermediate_size, layer.n_groups * layer.ssm_state_size
        x = spans(heads, layer.head_dim)
        b = channels + spans(groups, layer.ssm_state_size)
        convolved = torch.cat([x, b, states + b])
        inputs = torch.cat([convolved, channels + 2 * states + heads])
        cuts = rows(("conv1d.weight", "conv1d.bias"), convolved)
        sizes = {
            "intermediate_size": len(x),
            "num_heads": len(heads),
            "n_groups": len(groups),
            "conv_dim": len(convolved),
            "conv1d.groups": len(convolved),
        }
        return Share(inputs, x, cuts | rows(("dt_bias", "A_log", "D"), heads), sizes)

    def project(self, layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        features = layer.in_proj(hidden)
        return features[..., layer.intermediate_size :], features[..., : layer.intermediate_size]

    def finish(self, layer: Any, y: Tensor, kept: Any) -> Tensor:
        return layer.out_proj(layer.norm(y, kept))

    def instead(self, layer: Any, share: Share) -> dict[str, nn.Module]:
        return {"in_proj": Keep(len(share.outputs)), "norm": Keep(), "out_proj": Keep()}


class FalconH1(Mamba2):
    """Scales its input and its features; without its norm the gate multiplies the result."""

    def share(self, layer: Any, rank: int, size: int) -> Share:
        found = super().share(layer, rank, size)
        scales = {"ssm_in_multiplier": 1.0, "mup_vector": torch.ones(())}
        return replace(found, attributes=found.attributes | scales | {"mamba_rms_norm": True})

    def project(self, layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        features = layer.in_proj(hidden * layer.ssm_in_multiplier) * layer.mup_vector
        return features[..., layer.intermediate_size :], features[..., : layer.intermediate_size]

    def finish(self, layer: Any, y: Tensor, kept: Any) -> Tensor:
        return (
            super().finish(layer, y, kept)
            if layer.mamba_rms_norm
            else layer.out_proj(y * silu(kept))
        )


def _heads_and_groups(layer: Any, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """A rank's heads, and the groups that these read."""
    num_heads, num_groups = layer.num_heads, layer.n_groups
    divide("heads", num_heads, size)
    in_turn = _takes_groups_in_turn(layer)
    heads = torch.arange(num_heads)
    by_group = heads.view(-1, num_groups).T if in_turn else heads.view(num_groups, -1)
    if num_groups < size:
        sharing = divide("ranks", size, num_groups)
        group, at = divmod(rank, sharing)
        return by_group[group].chunk(sharing)[at], torch.tensor([group])
    groups = part("groups", num_groups, rank, size)
    mine = by_group[groups]
    return (mine.T if in_turn else mine).flatten(), groups


def _takes_groups_in_turn(layer: Any) -> bool:
    """Whether head h reads group h % G, and not h // (H / G).

    transformers 4 computes the former without the CUDA kernels, and the latter with them; later
    ones have no `torch_forward` and compute the latter always.
    """
    file, kind = sys.modules[type(layer).__module__], type(layer)
    on_cuda = layer.A_log.device.type == "cuda"
    kernels = on_cuda and bool(getattr(file, "is_fast_path_available", False))
    by_torch = getattr(kind, "torch_forward", None)
    return not kernels and by_torch is not None and "B = B.repeat(" in inspect.getsource(by_torch)


class Griffin(Mixer):
    """arXiv 2402.19427: heads whose gates mix the channels of a head."""

    def share(self, layer: Any, rank: int, size: int) -> Share:
        heads = part("num_attention_heads", layer.rg_lru.num_attention_heads, rank, size)
        mine = part("channels", layer.lru_width, rank, size)
        gates = ("input_gate", "recurrent_gate")
        by_head = tuple(f"rg_lru.{gate}_{kind}" for gate in gates for kind in ("weight", "bias"))
        by_channel = ("conv_1d.weight", "conv_1d.bias", "rg_lru.recurrent_param")
        sizes = {"conv_1d.groups": len(mine), "rg_lru.num_attention_heads": len(heads)}
        return Share(mine, mine, rows(by_channel, mine) | rows(by_head, heads), sizes)

    def project(self, layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return layer.linear_x(hidden), layer.act_fn(layer.linear_y(hidden))

    def finish(self, layer: Any, y: Tensor, kept: Any) -> Tensor:
        return layer.linear_out(y * kept)

    def instead(self, layer: Any, share: Share) -> dict[str, nn.Module]:
        return {"linear_x": Keep(), "linear_y": Keep(), "act_fn": _Ones(), "linear_out": Keep()}

    def words(self, layer: Any, x: Tensor) -> dict[str, Any]:
        layer.rg_lru.recurrent_states = None  # it would go on from the document before
        positions = torch.arange(x.shape[1], device=x.device).expand(len(x), -1)
        none = {"attention_mask": None, "cache_position": None, "use_cache": False}
        return {"position_ids": positions, **none}


class _Ones(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ones_like(x)


class ShortConv(Mixer):
    """LFM2: a short convolution of every channel between two gates."""

    def share(self, layer: Any, rank: int, size: int) -> Share:
        mine = part("channels", layer.conv.in_channels, rank, size)
        cuts = rows(("conv.weight", "conv.bias"), mine)
        return Share(mine, mine, cuts, {"conv.groups": len(mine)})

    def project(self, layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        gate, gate_behind, x = layer.in_proj(hidden).chunk(3, dim=-1)
        return gate * x, gate_behind

    def finish(self, layer: Any, y: Tensor, kept: Any) -> Tensor:
        return layer.out_proj(kept * y)

    def instead(self, layer: Any, share: Share) -> dict[str, nn.Module]:
        return {"in_proj": _OpenGates(), "out_proj": Keep()}


class _OpenGates(nn.Module):
    """x behind gates that are 1: (1, 1, x)."""

    def forward(self, x: Tensor) -> Tensor:
        ones = torch.ones_like(x)
        return torch.cat([ones, ones, x], dim=-1)


MIXERS: Mapping[str, Mixer] = MappingProxyType(
    {
        "MambaMixer": Mamba(),
        "FalconMambaMixer": Mamba(),
        "JambaMambaMixer": Mamba(),
        "ZambaMambaMixer": Zamba(),
        "Mamba2Mixer": Mamba2(),
        "BambaMixer": Mamba2(),
        "Zamba2MambaMixer": Mamba2(),
        "GraniteMoeHybridMambaLayer": Mamba2(),
        "NemotronHMamba2Mixer": Mamba2(),
        "FalconH1Mixer": FalconH1(),
        "RecurrentGemmaRecurrentBlock": Griffin(),
        "Lfm2ShortConv": ShortConv(),
        "Lfm2MoeShortConv": ShortConv(),
        "Lfm3ShortConv": ShortConv(),
        "Qwen3NextGatedDeltaNet": QWEN3_NEXT,
        "Qwen3_5GatedDeltaNet": QWEN3_5,
        "Qwen3_5MoeGatedDeltaNet": QWEN3_5,
        "LaraMiniGatedDeltaNet": QWEN3_5,
        "OlmoHybridGatedDeltaNet": OLMO_HYBRID,
        "KimiLinearDeltaAttention": KIMI_LINEAR,
        "BailingHybridDeltaAttention": BAILING_HYBRID,
    }
)
"""By class of transformers."""
