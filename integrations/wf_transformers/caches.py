"""Registers the key-value caches of transformers with pytree, so that models can be captured.

transformers 4 registers its `DynamicCache` itself. The functions that transformers 5 offers for it
drop the number of tokens that a layer with a sliding window has seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")
"""Cache layers of text models: keys and values of all tokens, or of a window."""


class _LayerSpec(NamedTuple):
    """A cache layer without its tensors. `cls` None: the layer itself is one leaf."""

    cls: type | None
    tensor_names: tuple[str, ...] = ()
    attributes: tuple[tuple[str, Any], ...] = ()


def register_caches() -> None:
    """Register how pytree flattens a `DynamicCache` and an `EncoderDecoderCache`, unless they are.

    A layer of another class than LAYERS stays one leaf; models with it cannot be captured.
    """
    if DynamicCache not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            DynamicCache,
            _flatten_cache,
            _unflatten_cache,
            serialized_type_name="transformers.cache_utils.DynamicCache",
        )
    if EncoderDecoderCache not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            EncoderDecoderCache,
            _flatten_pair,
            _unflatten_pair,
            serialized_type_name="transformers.cache_utils.EncoderDecoderCache",
        )


def _flatten_cache(cache: Any) -> tuple[list[Any], Any]:
    """(leaves, context), as pytree has them."""
    leaves, specs = list[Any](), list[_LayerSpec]()
    for layer in cache.layers:
        if type(layer).__name__ not in LAYERS:
            leaves.append(layer)
            specs.append(_LayerSpec(None))
            continue
        attributes = vars(layer)
        names = tuple(name for name, value in attributes.items() if isinstance(value, Tensor))
        leaves += [attributes[name] for name in names]
        others = tuple((name, value) for name, value in attributes.items() if name not in names)
        specs.append(_LayerSpec(type(layer), names, others))
    attributes = {name: value for name, value in vars(cache).items() if name != "layers"}
    return leaves, (tuple(specs), attributes)


def _unflatten_cache(leaves: Iterable[Any], context: Any) -> DynamicCache:
    specs, attributes = context
    remaining, cache = iter(leaves), object.__new__(DynamicCache)
    vars(cache).update(attributes, layers=[_rebuild_layer(spec, remaining) for spec in specs])
    return cache


def _rebuild_layer(spec: _LayerSpec, leaves: Iterator[Any]) -> Any:
    if spec.cls is None:
        return next(leaves)
    layer = object.__new__(spec.cls)
    vars(layer).update(spec.attributes)
    vars(layer).update({name: next(leaves) for name in spec.tensor_names})
    return layer


def _flatten_pair(cache: Any) -> tuple[list[Any], Any]:
    """The caches of self-attention and cross-attention, and what else the pair has. `is_updated`,
    which layers have cross-attention's keys, is copied: a forward changes it."""
    names = "self_attention_cache", "cross_attention_cache"
    others = {name: value for name, value in vars(cache).items() if name not in names}
    return [getattr(cache, name) for name in names], {**others, "is_updated": {**cache.is_updated}}


def _unflatten_pair(leaves: Iterable[Any], context: Any) -> EncoderDecoderCache:
    cache = object.__new__(EncoderDecoderCache)
    cache.self_attention_cache, cache.cross_attention_cache = leaves
    vars(cache).update({**context, "is_updated": {**context["is_updated"]}})
    return cache
