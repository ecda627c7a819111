"""Layers of the gated delta rule (arXiv 2412.06464): a convolution, and heads that have a state.

The ranks share the key heads, each with the value heads that read it: H key heads of d features, r
value heads of e features for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

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


def delta_rule(projections: Mapping[str, Features]) -> Mixer:
    """The row of such a layer, by its projections of hidden states. The gate travels with them."""

    def project(layer: Any, hidden: Tensor) -> tuple[Tensor, None]:
        found = [layer.get_submodule(name)(hidden) for name in projections]
        return torch.cat(found, dim=-1), None

    def share(layer: Any, rank: int, size: int) -> Share:
        heads = part("key heads", layer.num_k_heads, rank, size)
        sizes = [layer.get_submodule(name).out_features for name in projections]
        starts = accumulate(sizes, initial=0)
        mine = [at + of(layer, heads) for at, of in zip(starts, projections.values(), strict=False)]
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
        return Share(torch.cat(mine), _values(layer, heads), cuts, attributes)

    def instead(layer: Any, share: Share) -> dict[str, Any]:
        parts = layer.num_k_heads // share.attributes["num_k_heads"]
        ends = accumulate(layer.get_submodule(name).out_features // parts for name in projections)
        taken, start = dict[str, Any](), 0
        for name, end in zip(projections, ends, strict=True):
            taken[name], start = Take(start, end), end
        return taken | {"out_proj": Keep()}

    return Mixer(share, project, instead=instead, whole=("norm.weight",))


QWEN3_NEXT = delta_rule({"in_proj_qkvz": _by_head, "in_proj_ba": _scalars_by_head})
QWEN3_5 = delta_rule(
    {
        "in_proj_qkv": _convolved,
        "in_proj_z": _values,
        "in_proj_b": _value_heads,
        "in_proj_a": _value_heads,
    }
)
