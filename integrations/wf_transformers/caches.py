"""Registers the key-value caches of transformers with pytree, so that models can be captured.

transformers 4 registers its `DynamicCache` itself. The functions that transformers 5 offers for it
drop the number of tokens that a layer with a sliding window has seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import cache_utils

CACHE_CLASSES = ("EncoderDecoderCache", "DynamicCache", "DynamicLayer", "DynamicSlidingWindowLayer")
"""Classes of caches, and of layers of text models: keys and values of all tokens, or of a window.
A layer of another class stays one leaf; models with it cannot be captured."""


def register_caches() -> None:
    """Register how pytree flattens the classes of CACHE_CLASSES, unless it knows them."""
    for name in CACHE_CLASSES:
        cls = getattr(cache_utils, name, None)  # transformers 4 has no layers
        if cls is not None and cls not in pytree.SUPPORTED_NODES:
            pytree.register_pytree_node(
                cls,
                _flatten,
                partial(_unflatten, cls),
                serialized_type_name=f"{cls.__module__}.{name}",
            )


def _flatten(cache: Any) -> tuple[list[Any], Any]:
    """(children, context), as pytree has them: tensors, layers and caches are children."""
    attributes = vars(cache)
    known = (Tensor, cache_utils.Cache)
    names = tuple(k for k, x in attributes.items() if isinstance(x, known) or k == "layers")
    others = {name: value for name, value in attributes.items() if name not in names}
    return [attributes[name] for name in names], (names, _copied(others))


def _unflatten(cls: type, children: Iterable[Any], context: Any) -> Any:
    names, others = context
    cache = object.__new__(cls)
    vars(cache).update(_copied(others), **dict(zip(names, children, strict=True)))
    return cache


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """Copies of dicts: a forward changes `is_updated`, which layers have cross-attention's keys."""
    return {name: {**x} if isinstance(x, dict) else x for name, x in attributes.items()}
