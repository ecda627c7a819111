"""Layers of the gated delta rule (arXiv 2412.06464): a convolution, and heads with a state.

Each rank gets some of the H key heads of d features, and the r value heads of e features that read
each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from wf_transformers.families.shares import (
    Cuts,
    Mixer,
    Replacement,
    Share,
    cut_first_dim,
    head_features,
    rank_range,
)


class DeltaRule(Mixer):
    """A layer of the gated delta rule. Its gate is exchanged with q, k and v.

    Args:
        projections: of hidden states: the names of their modules, applied in order -> the kinds of
            features that they give, as in `widths`, one after the other.
        norm, out: the names of the norm and of the output projection.
    """

    def __init__(
        self, projections: Mapping[str, str], norm: str = "norm", out: str = "out_proj"
    ) -> None:
        self.projections = {tuple(names.split()): kinds for names, kinds in projections.items()}
        self.out, self.whole_parameters = out, (f"{norm}.weight",)

    def num_heads(self, layer: Any) -> int:
        """H."""
        return layer.num_k_heads

    def widths(self, layer: Any) -> dict[str, int]:
        """By kind how many features belong to one key head: d of a key, r e of its values, r
        numbers for its value heads, or several of these side by side."""
        r = layer.num_v_heads // layer.num_k_heads
        key, values = layer.head_k_dim, r * layer.head_v_dim
        return {"key": key, "values": values, "r": r, "qkvz": 2 * (key + values), "ba": 2 * r}

    def features(self, layer: Any, heads: Tensor, kinds: str) -> Tensor:
        """Indices of the features of key heads, where features are of these kinds, "a b c", and of
        each kind those of all H heads."""
        widths = [self.widths(layer)[kind] for kind in kinds.split()]
        starts = accumulate((self.num_heads(layer) * width for width in widths), initial=0)
        pairs = zip(starts, widths, strict=False)
        return torch.cat([start + head_features(heads, width) for start, width in pairs])

    def project(self, layer: Any, hidden: Tensor) -> tuple[Tensor, None]:
        projected = []
        for names in self.projections:
            x = hidden
            for name in names:
                x = layer.get_submodule(name)(x)
            projected.append(x)
        return torch.cat(projected, dim=-1), None

    def share(self, layer: Any, rank: int, size: int) -> Share:
        heads = rank_range("key heads", self.num_heads(layer), rank, size)
        kinds = (" ".join(self.projections.values()), "key key values", "values", "r")
        inputs, convolved, values, value_heads = (self.features(layer, heads, x) for x in kinds)
        cuts, sizes = self.of_heads(layer, heads, values, value_heads)
        cuts |= cut_first_dim("conv1d.weight", convolved)
        return Share(inputs, values, cuts, sizes | {"conv_dim": len(convolved)})

    def of_heads(
        self, layer: Any, heads: Tensor, values: Tensor, value_heads: Tensor
    ) -> tuple[Cuts, dict[str, Any]]:
        """The cuts and sizes of a share with these key heads, besides those of the convolution;
        `values` are the features of the heads' values."""
        sizes = {
            "num_k_heads": len(heads),
            "num_v_heads": len(value_heads),
            "key_dim": len(heads) * layer.head_k_dim,
            "value_dim": len(values),
        }
        return cut_first_dim("dt_bias A_log", value_heads), sizes

    def replacements(self, layer: Any, share: Share) -> dict[str, nn.Module]:
        widths, modules = self.widths(layer), dict[str, nn.Module]()
        num_heads = len(share.outputs) // widths["values"]
        sizes = [sum(widths[x] for x in kinds.split()) for kinds in self.projections.values()]
        borders = accumulate((num_heads * size for size in sizes), initial=0)
        for (first, *others), span in zip(self.projections, pairwise(borders), strict=True):
            features = itemgetter((..., slice(*span)))
            modules |= {first: Replacement(features)} | {name: Replacement() for name in others}
        return modules | {self.out: Replacement()}

    def finish(self, layer: Any, y: Tensor, local: Any) -> Tensor:
        return layer.get_submodule(self.out)(y)


class KimiDelta(DeltaRule):
    """Kimi Delta Attention (arXiv 2510.26692): as many value heads as key heads, of the same size,
    and a decay for each channel."""

    def num_heads(self, layer: Any) -> int:
        return layer.num_heads

    def widths(self, layer: Any) -> dict[str, int]:
        return {"key": layer.head_dim, "values": layer.head_dim, "r": 1}

    def of_heads(
        self, layer: Any, heads: Tensor, values: Tensor, value_heads: Tensor
    ) -> tuple[Cuts, dict[str, Any]]:
        cuts = cut_first_dim("forget_gate.dt_bias", values)
        cuts |= {"forget_gate.A_log": (layer.forget_gate.A_log.shape.index(layer.num_heads), heads)}
        sizes = dict.fromkeys(("num_heads", "forget_gate.num_heads"), len(heads))
        return cuts, sizes | {"qkv_dim": len(values)}


_QKV = {"q_proj": "key", "k_proj": "key", "v_proj": "values"}
_O = {"norm": "o_norm", "out": "o_proj"}
_QWEN3_5 = DeltaRule(
    {"in_proj_qkv": "key key values", "in_proj_z": "values", "in_proj_b": "r", "in_proj_a": "r"}
)
_KIMI_LINEAR = KimiDelta(
    {
        **_QKV,
        "b_proj": "r",
        "forget_gate.f_a_proj forget_gate.f_b_proj": "key",
        "g_a_proj g_b_proj": "values",
    },
    **_O,
)
DELTA_RULES: Mapping[str, DeltaRule] = MappingProxyType(
    {
        "Qwen3NextGatedDeltaNet": DeltaRule({"in_proj_qkvz": "qkvz", "in_proj_ba": "ba"}),
        "Qwen3_5GatedDeltaNet": _QWEN3_5,
        "Qwen3_5MoeGatedDeltaNet": _QWEN3_5,
        "LaraMiniGatedDeltaNet": _QWEN3_5,
        "OlmoHybridGatedDeltaNet": DeltaRule(
            {**_QKV, "a_proj": "r", "b_proj": "r", "g_proj": "values"}, **_O
        ),
        "KimiLinearDeltaAttention": _KIMI_LINEAR,
        "Glm5NextTextLinearAttention": _KIMI_LINEAR,
        "BailingHybridDeltaAttention": KimiDelta(
            {**_QKV, "b_proj": "r", "forget_gate.f_proj": "key", "g_proj": "values"}, **_O
        ),
    }
)
"""By the name of a class of transformers."""
