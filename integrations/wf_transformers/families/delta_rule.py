"""Layers of the gated delta rule (arXiv 2412.06464): a convolution, and heads that have a state.

The ranks share the key heads, each with the value heads that read it: H key heads of d features, r
value heads of e features for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from wf_transformers.families.shares import Keep, Mixer, Share, Take, part, rows, spans

Features = Callable[[Any, Tensor], Tensor]
"""(layer, key heads) -> which features of a projection are theirs, in the order of their code."""


def _readers(layer: Any) -> int:
    return layer.num_v_heads // layer.num_k_heads


def _value_heads(layer: Any, heads: Tensor) -> Tensor:
    return spans(heads, _readers(layer))


def _values(layer: Any, heads: Tensor) -> Tensor:
    return spans(_value_heads(layer, heads), layer.head_v_dim)


def _keys(layer: Any, heads: Tensor) -> Tensor:
    return spans(heads, layer.head_k_dim)


def _convolved(layer: Any, heads: Tensor) -> Tensor:
    """All queries, all keys, all values."""
    keys = _keys(layer, heads)
    return torch.cat([keys, layer.key_dim + keys, 2 * layer.key_dim + _values(layer, heads)])


def _channels(layer: Any, heads: Tensor) -> Tensor:
    """Of heads that have one size."""
    return spans(heads, layer.head_dim)


def _heads(_: Any, heads: Tensor) -> Tensor:
    return heads


def _by_head(layer: Any, heads: Tensor) -> Tensor:
    """q, k, v and the gate of a key head, one key head after another: 2 d + 2 r e features each."""
    return spans(heads, 2 * layer.head_k_dim + 2 * _readers(layer) * layer.head_v_dim)


def _scalars_by_head(layer: Any, heads: Tensor) -> Tensor:
    """Two numbers for every value head of a key head: the strengths of writing and forgetting."""
    return spans(heads, 2 * _readers(layer))


class DeltaRule(Mixer):
    """Such a layer, by its projections of hidden states. The gate travels with them.

    Args:
        projections: by the names of their modules, one after the other.
        norm, out: the names of the norm and of the projection of its result.
    """

    def __init__(
        self, projections: Mapping[str, Features], norm: str = "norm", out: str = "out_proj"
    ) -> None:
        self.projections = {tuple(names.split()): of for names, of in projections.items()}
        self.out, self.whole = out, (f"{norm}.weight",)

    def project(self, layer: Any, hidden: Tensor) -> tuple[Tensor, None]:
        found = []
        for names in self.projections:
            x = hidden
            for name in names:
                x = layer.get_submodule(name)(x)
            found.append(x)
        return torch.cat(found, dim=-1), None

    def share(self, layer: Any, rank: int, size: int) -> Share:
        heads = part("key heads", layer.num_k_heads, rank, size)
        convolved, readers = _convolved(layer, heads), _value_heads(layer, heads)
        cuts = rows(("conv1d.weight",), convolved) | rows(("dt_bias", "A_log"), readers)
        attributes = {
            "num_k_heads": len(heads),
            "num_v_heads": len(readers),
            "key_dim": len(heads) * layer.head_k_dim,
            "value_dim": len(readers) * layer.head_v_dim,
            "conv_dim": len(convolved),
            "conv1d.groups": len(convolved),
        }
        return Share(self.features(layer, heads), _values(layer, heads), cuts, attributes)

    def features(self, layer: Any, heads: Tensor) -> Tensor:
        """Those of all projections, one after the other, that are these heads'."""
        starts = accumulate(self._sizes(layer), initial=0)
        found = zip(starts, self.projections.values(), strict=False)
        return torch.cat([start + of(layer, heads) for start, of in found])

    def instead(self, layer: Any, share: Share) -> dict[str, nn.Module]:
        parts = layer.get_submodule(self.out).in_features // len(share.outputs)
        ends = accumulate((size // parts for size in self._sizes(layer)), initial=0)
        found: dict[str, nn.Module] = {self.out: Keep()}
        for (first, *others), taken in zip(self.projections, pairwise(ends), strict=True):
            found |= {first: Take(*taken)} | {name: Keep() for name in others}
        return found

    def finish(self, layer: Any, y: Tensor, kept: Any) -> Tensor:
        return layer.get_submodule(self.out)(y)

    def _sizes(self, layer: Any) -> list[int]:
        return [layer.get_submodule(names[-1]).out_features for names in self.projections]


class KimiDelta(DeltaRule):
    """Kimi Delta Attention (arXiv 2510.26692): as many value heads as key heads, of one size, and a
    strength of forgetting for each channel."""

    def share(self, layer: Any, rank: int, size: int) -> Share:
        heads = part("heads", layer.num_heads, rank, size)
        channels = _channels(layer, heads)
        convolved = torch.cat([layer.qkv_dim * i + channels for i in range(3)])
        cuts = rows(("conv1d.weight",), convolved) | rows(("forget_gate.dt_bias",), channels)
        cuts |= {"forget_gate.A_log": (layer.forget_gate.A_log.shape.index(layer.num_heads), heads)}
        attributes = {
            "num_heads": len(heads),
            "forget_gate.num_heads": len(heads),
            "qkv_dim": len(channels),
            "conv_dim": len(convolved),
            "conv1d.groups": len(convolved),
        }
        return Share(self.features(layer, heads), channels, cuts, attributes)


QWEN3_NEXT = DeltaRule({"in_proj_qkvz": _by_head, "in_proj_ba": _scalars_by_head})
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
