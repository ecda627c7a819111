"""What key-value caches of transformers 5 are made of, for graphs of a model.

Those of transformers 4 tell pytree themselves. What 5 offers for that forgets how many tokens a
layer with a sliding window has seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.cache_utils import DynamicCache

LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")
"""The layers of text models: keys and values of all tokens, or of a window."""


class _Layer(NamedTuple):
    """A layer of a cache without its tensors; what `kind` is None of stays whole."""

    kind: type | None
    tensors: tuple[str, ...] = ()
    fields: tuple[tuple[str, Any], ...] = ()


def register_caches() -> None:
    """Tell pytree how a `DynamicCache` is taken apart. Does nothing if it knows.

    Layers that are none of LAYERS stay whole: no graph takes them.
    """
    if DynamicCache not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            DynamicCache,
            _take_apart,
            _put_together,
            serialized_type_name="transformers.cache_utils.DynamicCache",
        )


def _take_apart(cache: Any) -> tuple[list[Any], Any]:
    """(tensors and other leaves, the rest)."""
    leaves, layers = list[Any](), list[_Layer]()
    for layer in cache.layers:
        if type(layer).__name__ not in LAYERS:
            leaves.append(layer)
            layers.append(_Layer(None))
            continue
        found = vars(layer)
        names = tuple(name for name, value in found.items() if isinstance(value, Tensor))
        leaves += [found[name] for name in names]
        rest = tuple((name, value) for name, value in found.items() if name not in names)
        layers.append(_Layer(type(layer), names, rest))
    more = {name: value for name, value in vars(cache).items() if name != "layers"}
    return leaves, (tuple(layers), more)


def _put_together(leaves: Iterable[Any], rest: Any) -> DynamicCache:
    layers, more = rest
    given, cache = iter(leaves), object.__new__(DynamicCache)
    vars(cache).update(more, layers=[_layer(one, given) for one in layers])
    return cache


def _layer(one: _Layer, given: Any) -> Any:
    if one.kind is None:
        return next(given)
    layer = object.__new__(one.kind)
    vars(layer).update(one.fields)
    vars(layer).update({name: next(given) for name in one.tensors})
    return layer
