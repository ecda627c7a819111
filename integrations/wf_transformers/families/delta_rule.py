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


def _convolved(layer: Any, heads: Tensor) -> Tensor:
    """All queries, all keys, all values."""
    keys = spans(heads, layer.head_k_dim)
    return torch.cat([keys, layer.key_dim + keys, 2 * layer.key_dim + _values(layer, heads)])


def _by_head(layer: Any, heads: Tensor) -> Tensor:
    """q, k, v and the gate of a key head, one key head after another: 2 d + 2 r e features each."""
    return spans(heads, 2 * layer.head_k_dim + 2 * _readers(layer) * layer.head_v_dim)


def _scalars_by_head(layer: Any, heads: Tensor) -> Tensor:
    """Two numbers for every value head of a key head: the strengths of writing and forgetting."""
    return spans(heads, 2 * _readers(layer))


class DeltaRule(Mixer):
    """Such a layer, by its projections of hidden states. The gate travels with them."""

    whole = ("norm.weight",)

    def __init__(self, projections: Mapping[str, Features]) -> None:
        self.projections = projections

    def project(self, layer: Any, hidden: Tensor) -> tuple[Tensor, None]:
        found = [layer.get_submodule(name)(hidden) for name in self.projections]
        return torch.cat(found, dim=-1), None

    def share(self, layer: Any, rank: int, size: int) -> Share:
        heads = part("key heads", layer.num_k_heads, rank, size)
        features = [of(layer, heads) for of in self.projections.values()]
        starts = accumulate(self._sizes(layer), initial=0)
        mine = torch.cat([at + of for at, of in zip(starts, features, strict=False)])
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
        return Share(mine, _values(layer, heads), cuts, attributes)

    def instead(self, layer: Any, share: Share) -> dict[str, nn.Module]:
        parts = layer.num_k_heads // share.attributes["num_k_heads"]
        ends = accumulate((size // parts for size in self._sizes(layer)), initial=0)
        taken = [Take(start, end) for start, end in pairwise(ends)]
        return {**dict(zip(self.projections, taken, strict=True)), "out_proj": Keep()}

    def _sizes(self, layer: Any) -> list[int]:
        return [layer.get_submodule(name).out_features for name in self.projections]


QWEN3_NEXT = DeltaRule({"in_proj_qkvz": _by_head, "in_proj_ba": _scalars_by_head})
QWEN3_5 = DeltaRule(
    {
        "in_proj_qkv": _convolved,
        "in_proj_z": _values,
        "in_proj_b": _value_heads,
        "in_proj_a": _value_heads,
    }
)
