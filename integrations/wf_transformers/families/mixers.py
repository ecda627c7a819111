"""The table of layers that mix tokens by a convolution and a recurrence: how ranks share them.

A row says which channels and parameters of a layer one rank has. The layer's code then runs on
these (mixing.py).

Shapes: I channels, N state size, H heads of p channels, G groups of heads that share B and C.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from wf_transformers.families.delta_rule import DELTA_RULES
from wf_transformers.families.shares import (
    Mixer,
    Replacement,
    Share,
    cut_first_dim,
    divide,
    head_features,
    rank_range,
)
from wf_transformers.models import file_of


class Mamba(Mixer):
    """arXiv 2312.00752: every channel has its own state; dt, B and C are sums over all channels."""

    summed_modules = ("x_proj",)
    whole_parameters = ("dt_layernorm.weight", "b_layernorm.weight", "c_layernorm.weight")

    def share(self, layer: Any, rank: int, size: int) -> Share:
        channels = layer.intermediate_size
        mine = rank_range("channels", channels, rank, size)
        cuts = cut_first_dim("conv1d.weight conv1d.bias dt_proj.weight dt_proj.bias A_log D", mine)
        cuts |= {"x_proj.weight": (1, mine)}
        sizes = {"intermediate_size": len(mine)}
        return Share(torch.cat([mine, channels + mine]), mine, cuts, sizes)


class Zamba(Mixer):
    """Every head is a Mamba; the projected features are (channel, gate) pairs."""

    def share(self, layer: Any, rank: int, size: int) -> Share:
        heads = rank_range("n_mamba_heads", layer.n_mamba_heads, rank, size)
        mine = rank_range("channels", layer.intermediate_size, rank, size)
        cuts = cut_first_dim("x_proj_weight dt_proj_weight dt_proj_bias A_log D", heads)
        cuts |= cut_first_dim("conv1d.weight conv1d.bias", mine)
        pairs = rank_range("channels", 2 * layer.intermediate_size, rank, size)
        sizes = {"intermediate_size": len(mine), "n_mamba_heads": len(heads)}
        return Share(pairs, mine, cuts, sizes)


class Mamba2(Mixer):
    """arXiv 2405.21060: groups of heads share B and C. The gate is not exchanged."""

    def share(self, layer: Any, rank: int, size: int) -> Share:
        heads, groups = heads_and_groups(layer, rank, size)
        channels, states = layer.intermediate_size, layer.n_groups * layer.ssm_state_size
        x = head_features(heads, layer.head_dim)
        b = channels + head_features(groups, layer.ssm_state_size)
        convolved = torch.cat([x, b, states + b])
        inputs = torch.cat([convolved, channels + 2 * states + heads])
        cuts = cut_first_dim("conv1d.weight conv1d.bias", convolved)
        cuts |= cut_first_dim("dt_bias A_log D", heads)
        sizes = {
            "intermediate_size": len(x),
            "num_heads": len(heads),
            "n_groups": len(groups),
            "conv_dim": len(convolved),
        }
        return Share(inputs, x, cuts, sizes)

    def project(self, layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        features = layer.in_proj(hidden)
        return features[..., layer.intermediate_size :], features[..., : layer.intermediate_size]

    def finish(self, layer: Any, y: Tensor, local: Any) -> Tensor:
        return layer.out_proj(layer.norm(y, local))

    def replacements(self, layer: Any, share: Share) -> dict[str, nn.Module]:
        in_proj = Replacement(partial(pad, pad=(len(share.outputs), 0)))  # no gate, but zeros
        return {"in_proj": in_proj, "norm": Replacement(), "out_proj": Replacement()}


class FalconH1(Mamba2):
    """A Mamba2 with scaled input and features; without a norm the gate multiplies the result."""

    def share(self, layer: Any, rank: int, size: int) -> Share:
        share = super().share(layer, rank, size)
        scales = {"ssm_in_multiplier": 1.0, "mup_vector": torch.ones(())}
        return replace(share, attributes=share.attributes | scales | {"mamba_rms_norm": True})

    def project(self, layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        features = layer.in_proj(hidden * layer.ssm_in_multiplier) * layer.mup_vector
        return features[..., layer.intermediate_size :], features[..., : layer.intermediate_size]

    def finish(self, layer: Any, y: Tensor, local: Any) -> Tensor:
        if layer.mamba_rms_norm:
            return super().finish(layer, y, local)
        return layer.out_proj(y * silu(local))


def heads_and_groups(layer: Any, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """A rank's heads, and the groups that these read."""
    num_heads, num_groups = layer.num_heads, layer.n_groups
    divide("heads", num_heads, size)
    interleaved = _has_interleaved_groups(layer)
    heads = torch.arange(num_heads)
    by_group = heads.view(-1, num_groups).T if interleaved else heads.view(num_groups, -1)
    if num_groups < size and size % num_groups == 0:
        ranks_per_group = size // num_groups
        group, index_in_group = divmod(rank, ranks_per_group)
        return by_group[group].chunk(ranks_per_group)[index_in_group], torch.tensor([group])
    groups = rank_range("groups", num_groups, rank, size)
    mine = by_group[groups]
    return (mine.T if interleaved else mine).flatten(), groups


def _has_interleaved_groups(layer: Any) -> bool:
    """Whether head h reads group h % G instead of group h // (H / G).

    transformers 4 does so unless it uses the CUDA kernels. Later versions have no `torch_forward`
    and never do.
    """
    on_cuda = layer.A_log.device.type == "cuda"
    if on_cuda and getattr(file_of(layer), "is_fast_path_available", False):
        return False
    torch_forward = getattr(type(layer), "torch_forward", None)
    return torch_forward is not None and "B = B.repeat(" in inspect.getsource(torch_forward)


class Griffin(Mixer):
    """arXiv 2402.19427: the gates mix the channels of a head."""

    def share(self, layer: Any, rank: int, size: int) -> Share:
        heads = rank_range("num_attention_heads", layer.rg_lru.num_attention_heads, rank, size)
        mine = rank_range("channels", layer.lru_width, rank, size)
        cuts = cut_first_dim("conv_1d.weight conv_1d.bias rg_lru.recurrent_param", mine)
        for gate in ("rg_lru.input_gate", "rg_lru.recurrent_gate"):
            cuts |= cut_first_dim(f"{gate}_weight {gate}_bias", heads)
        return Share(mine, mine, cuts, {"rg_lru.num_attention_heads": len(heads)})

    def project(self, layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return layer.linear_x(hidden), layer.act_fn(layer.linear_y(hidden))

    def finish(self, layer: Any, y: Tensor, local: Any) -> Tensor:
        return layer.linear_out(y * local)

    def replacements(self, layer: Any, share: Share) -> dict[str, nn.Module]:
        linears = {name: Replacement() for name in ("linear_x", "linear_y", "linear_out")}
        return {**linears, "act_fn": Replacement(torch.ones_like)}

    def call_kwargs(self, layer: Any, x: Tensor) -> dict[str, Any]:
        layer.rg_lru.recurrent_states = None  # or it would continue from the previous document
        positions = torch.arange(x.shape[1], device=x.device).expand(len(x), -1)
        no_cache = {"attention_mask": None, "cache_position": None, "use_cache": False}
        return {"position_ids": positions, **no_cache}


class ShortConv(Mixer):
    """LFM2: a short convolution of every channel between two gates."""

    def share(self, layer: Any, rank: int, size: int) -> Share:
        mine = rank_range("channels", layer.conv.in_channels, rank, size)
        return Share(mine, mine, cut_first_dim("conv.weight conv.bias", mine), {})

    def project(self, layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        input_gate, output_gate, x = layer.in_proj(hidden).chunk(3, dim=-1)
        return input_gate * x, output_gate

    def finish(self, layer: Any, y: Tensor, local: Any) -> Tensor:
        return layer.out_proj(local * y)

    def replacements(self, layer: Any, share: Share) -> dict[str, nn.Module]:
        def open_gates(x: Tensor) -> Tensor:
            return torch.cat([torch.ones_like(x), torch.ones_like(x), x], dim=-1)

        return {"in_proj": Replacement(open_gates), "out_proj": Replacement()}


class Lightning(Mixer):
    """Lightning attention (arXiv 2401.04658): heads with a state each, which decays at a rate of
    its own. The norm and the gate are over all heads, and are not exchanged."""

    has_own_cache = True
    decays = ("slope_rate", "query_decay", "key_decay")

    def share(self, layer: Any, rank: int, size: int) -> Share:
        heads = rank_range("heads", layer.num_attention_heads, rank, size)
        of_heads = {name: getattr(layer, name)[heads] for name in self.decays}
        of_heads |= {"diagonal_decay": layer.diagonal_decay[:, heads]}
        inputs, outputs = (head_features(heads, n * layer.head_dim) for n in (3, 1))
        return Share(inputs, outputs, {}, {"num_attention_heads": len(heads), **of_heads})

    def project(self, layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return layer.qkv_proj(hidden), layer.output_gate(hidden)

    def finish(self, layer: Any, y: Tensor, local: Any) -> Tensor:
        return layer.out_proj(local.sigmoid() * layer.norm(y))

    def replacements(self, layer: Any, share: Share) -> dict[str, nn.Module]:
        open_gate = Replacement(lambda x: x.new_full((), torch.inf))
        unchanged = {name: Replacement() for name in ("qkv_proj", "norm", "out_proj")}
        return {**unchanged, "output_gate": open_gate}

    def call_kwargs(self, layer: Any, x: Tensor) -> dict[str, Any]:
        layer.to(x.device)  # its buffers
        return {"position_embeddings": None, "attention_mask": None}


MIXERS: Mapping[str, Mixer] = MappingProxyType(
    {
        **dict.fromkeys(("MambaMixer", "FalconMambaMixer", "JambaMambaMixer"), Mamba()),
        "ZambaMambaMixer": Zamba(),
        **dict.fromkeys(("Mamba2Mixer", "BambaMixer", "Zamba2MambaMixer"), Mamba2()),
        **dict.fromkeys(("GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer"), Mamba2()),
        "FalconH1Mixer": FalconH1(),
        "RecurrentGemmaRecurrentBlock": Griffin(),
        **dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"), ShortConv()),
        "MiniMaxLightningAttention": Lightning(),
        **DELTA_RULES,
    }
)
"""By the name of a class of transformers."""
