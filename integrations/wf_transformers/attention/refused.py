"""What no layer may ask of our attention."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from wf_transformers.calls import ON_ONE_PROCESS

# Keyword arguments of attention layers that no kernel of ours supports.
UNSUPPORTED: Mapping[str, str] = MappingProxyType(
    {
        "head_mask": "head masks",
        "layer_head_mask": "head masks",
        "output_attentions": "output_attentions=True: attention weights are never formed",
        "encoder_hidden_states": "cross attention",
        "past_key_value": "a KV cache",
    }
)

IN_STACK = "wallfacer_stack"
"""Attribute of layers in models that are cut inside: "self" or "cross". Their masks cover all S."""


def refuse_unsupported(layer: str, kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments of an attention layer that no kernel of ours supports."""
    for name, feature in UNSUPPORTED.items():
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise NotImplementedError(f"{layer} asks for {feature}, which WallFacer lacks")


def refuse_layer(module: nn.Module, query: Tensor, key: Tensor, kwargs: Mapping[str, Any]) -> None:
    layer, config = type(module).__name__, getattr(module, "config", None)
    refuse_unsupported(layer, kwargs)
    bias = kwargs.get("position_bias")
    if bias is not None and bias.dim() != 2:
        raise NotImplementedError(f"{layer} asks for an attention bias, which WallFacer lacks")
    if kwargs.get("cu_seq_lens_q") is not None:
        raise ValueError(
            "cu_seq_lens_q are not used here: pass cu_seqlens, global and as host integers"
        )
    if getattr(config, "output_attentions", False):
        raise NotImplementedError(f"{layer} asks for {UNSUPPORTED['output_attentions']}")
    if getattr(module, "is_cross_attention", False):
        raise NotImplementedError(f"{layer} asks for cross attention, which WallFacer lacks here")
    if query.shape[2] != key.shape[2] and getattr(module, IN_STACK, None) != "cross":
        raise NotImplementedError(
            f"{layer} has {query.shape[2]} queries and {key.shape[2]} keys on this rank: a KV "
            f"cache is not supported; {ON_ONE_PROCESS}"
        )


def refuse_window(module: nn.Module, window: tuple[int, int] | None) -> None:
    if window is not None:
        raise NotImplementedError(
            f"{type(module).__name__} has a sliding window {window}, and slices of a mask say all "
            "that is seen: they hold for every layer, so take a model without windows"
        )
