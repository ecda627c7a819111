"""Layers of the gated delta rule (arXiv 2412.06464): a convolution, and heads with a state.

Each rank gets some of the H key heads of d features, and the r value heads of e features that read
each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from wf_transformers.families.shares import (
    Mixer,
    Replacement,
    Share,
    cut_first_dim,
    head_features,
    rank_range,
)

Features = Callable[[Any, Tensor], Tensor]
"""(layer, key heads) -> indices of their features in a projection, in the order of the layer."""


def _values_per_key(layer: Any) -> int:
    return layer.num_v_heads // layer.num_k_heads


def _value_heads(layer: Any, heads: Tensor) -> Tensor:
    return head_features(heads, _values_per_key(layer))


def _values(layer: Any, heads: Tensor) -> Tensor:
    return head_features(_value_heads(layer, heads), layer.head_v_dim)


def _keys(layer: Any, heads: Tensor) -> Tensor:
    return head_features(heads, layer.head_k_dim)


def _convolved(layer: Any, heads: Tensor) -> Tensor:
    """Features of q, k and v, concatenated, as the convolution has them."""
    keys = _keys(layer, heads)
    return torch.cat([keys, layer.key_dim + keys, 2 * layer.key_dim + _values(layer, heads)])


def _channels(layer: Any, heads: Tensor) -> Tensor:
    """For layers whose keys and values have the same head_dim."""
    return head_features(heads, layer.head_dim)


def _heads(_: Any, heads: Tensor) -> Tensor:
    return heads


def _qkvz_by_key_head(layer: Any, heads: Tensor) -> Tensor:
    """q, k, v and gate of one key head after the other: 2 d + 2 r e features per key head."""
    width = 2 * layer.head_k_dim + 2 * _values_per_key(layer) * layer.head_v_dim
    return head_features(heads, width)


def _ba_by_key_head(layer: Any, heads: Tensor) -> Tensor:
    """Beta (write strength) and decay of the value heads of one key head after the other."""
    return head_features(heads, 2 * _values_per_key(layer))


class DeltaRule(Mixer):
    """A layer of the gated delta rule. Its gate is exchanged with q, k and v.

    Args:
        projections: of hidden states, by the names of their modules, applied in order.
        norm, out: the names of the norm and of the output projection.
    """

    def __init__(
        self, projections: Mapping[str, Features], norm: str = "norm", out: str = "out_proj"
    ) -> None:
        self.projections = {tuple(names.split()): select for names, select in projections.items()}
        self.out, self.whole_parameters = out, (f"{norm}.weight",)

    def project(self, layer: Any, hidden: Tensor) -> tuple[Tensor, None]:
        projected = []
        for names in self.projections:
            x = hidden
            for name in names:
                x = layer.get_submodule(name)(x)
            projected.append(x)
        return torch.cat(projected, dim=-1), None

    def share(self, layer: Any, rank: int, size: int) -> Share:
        heads = rank_range("key heads", layer.num_k_heads, rank, size)
        convolved, value_heads = _convolved(layer, heads), _value_heads(layer, heads)
        cuts = cut_first_dim("conv1d.weight", convolved)
        cuts |= cut_first_dim("dt_bias A_log", value_heads)
        attributes = {
            "num_k_heads": len(heads),
            "num_v_heads": len(value_heads),
            "key_dim": len(heads) * layer.head_k_dim,
            "value_dim": len(value_heads) * layer.head_v_dim,
            "conv_dim": len(convolved),
            "conv1d.groups": len(convolved),
        }
        return Share(self.features(layer, heads), _values(layer, heads), cuts, attributes)

    def features(self, layer: Any, heads: Tensor) -> Tensor:
        """The features of these heads in all projections, concatenated."""
        starts = accumulate(self._sizes(layer), initial=0)
        selections = zip(starts, self.projections.values(), strict=False)
        return torch.cat([start + select(layer, heads) for start, select in selections])

    def replacements(self, layer: Any, share: Share) -> dict[str, nn.Module]:
        num_ranks = layer.get_submodule(self.out).in_features // len(share.outputs)
        borders = accumulate((size // num_ranks for size in self._sizes(layer)), initial=0)
        modules: dict[str, nn.Module] = {self.out: Replacement()}
        for (first, *others), span in zip(self.projections, pairwise(borders), strict=True):
            features = itemgetter((..., slice(*span)))
            modules |= {first: Replacement(features)} | {name: Replacement() for name in others}
        return modules

    def finish(self, layer: Any, y: Tensor, local: Any) -> Tensor:
        return layer.get_submodule(self.out)(y)

    def _sizes(self, layer: Any) -> list[int]:
        return [layer.get_submodule(names[-1]).out_features for names in self.projections]


class KimiDelta(DeltaRule):
    """Kimi Delta Attention (arXiv 2510.26692): as many value heads as key heads, of the same size,
    and a decay for each channel."""

    def share(self, layer: Any, rank: int, size: int) -> Share:
        heads = rank_range("heads", layer.num_heads, rank, size)
        channels = _channels(layer, heads)
        convolved = torch.cat([layer.qkv_dim * i + channels for i in range(3)])
        cuts = cut_first_dim("conv1d.weight", convolved)
        cuts |= cut_first_dim("forget_gate.dt_bias", channels)
        cuts |= {"forget_gate.A_log": (layer.forget_gate.A_log.shape.index(layer.num_heads), heads)}
        attributes = {
            "num_heads": len(heads),
            "forget_gate.num_heads": len(heads),
            "qkv_dim": len(channels),
            "conv_dim": len(convolved),
            "conv1d.groups": len(convolved),
        }
        return Share(self.features(layer, heads), channels, cuts, attributes)


QWEN3_NEXT = DeltaRule({"in_proj_qkvz": _qkvz_by_key_head, "in_proj_ba": _ba_by_key_head})
QWEN3_5 = DeltaRule(
    {
        "in_proj_qkv": _convolved,
        "in_proj_z": _values,
        "in_proj_b": _value_heads,
        "in_proj_a": _value_heads,
    }
)
OLMO_HYBRID = DeltaRule(
    {
        "q_proj": _keys,
        "k_proj": _keys,
        "v_proj": _values,
        "a_proj": _value_heads,
        "b_proj": _value_heads,
        "g_proj": _values,
    },
    norm="o_norm",
    out="o_proj",
)
_KIMI = {"q_proj": _channels, "k_proj": _channels, "v_proj": _channels, "b_proj": _heads}
KIMI_LINEAR = KimiDelta(
    {
        **_KIMI,
        "forget_gate.f_a_proj forget_gate.f_b_proj": _channels,
        "g_a_proj g_b_proj": _channels,
    },
    norm="o_norm",
    out="o_proj",
)
BAILING_HYBRID = KimiDelta(
    {**_KIMI, "forget_gate.f_proj": _channels, "g_proj": _channels}, norm="o_norm", out="o_proj"
)
