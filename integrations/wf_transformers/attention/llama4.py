"""What layers of Llama 4 ask of attention: chunks, and queries that grow with their position.

A layer with rotary embeddings sees the keys of its chunk of `attention_chunk_size` tokens alone,
counted from the start of a document: for this layer chunks are documents. A layer without them may
multiply its queries by a function of the number of their token in the whole sequence
(`attn_temperature_tuning`), which it would count in a rank's own rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from wf_backends.schedule import LAYOUTS, SLICE_ARGUMENTS

TUNING = "attn_temperature_tuning"
SCALED = "wallfacer_scaled"
"""Attribute set on layers whose queries `scaled_by_position` multiplies, not they themselves."""


def chunk_borders(
    attention: Any, module: nn.Module, rows: int, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The documents of a layer, cut into its chunks; nothing for a layer without chunks.

    `rows` are those of this rank, `options` those of `SequenceParallel.attention`.
    """
    size, sp = _chunk_size(module), attention.sp
    if size is None:
        return {}
    layout, name = LAYOUTS[sp.config.layout], type(module).__name__
    if layout.needs_documents or layout.needs_slices or SLICE_ARGUMENTS[0] in options:
        raise NotImplementedError(
            f"{name} has chunks of {size} tokens, which the {sp.config.layout} layout and slices "
            'of a mask do not know: take "zigzag" or "contiguous", and cu_seqlens'
        )
    if attention.cache is not None:
        raise NotImplementedError(f"{name} has chunks, which generation over ranks lacks")
    seqlen = options["seqlen"] or rows * sp.size
    documents = pairwise(options.get("cu_seqlens") or (0, seqlen))
    starts = [start for first, last in documents for start in range(first, last, size)]
    return {"cu_seqlens": (*starts, seqlen)} if len(starts) > 1 else {}


def _chunk_size(module: nn.Module) -> int | None:
    """The tokens of a chunk, if a layer has chunks."""
    config = getattr(module, "config", None)
    size = getattr(config, "attention_chunk_size", None)
    if size is None:
        return None
    types = getattr(config, "layer_types", None)  # of transformers 5
    if types is None and not hasattr(module, "use_rope"):
        raise NotImplementedError(
            f"{type(module).__name__} asks for chunked attention, and not as Llama 4 does"
        )
    chunked = _has_rope(module) if types is None else types[module.layer_idx] == "chunked_attention"
    return size if chunked else None


def _has_rope(module: nn.Module) -> bool:
    return bool(getattr(module, "use_rope", True))


def _counts_tokens(module: nn.Module) -> bool:
    return bool(getattr(module, TUNING, False)) and not _has_rope(module)


def scaled_by_position(
    attention: Any, module: nn.Module, query: Tensor, kwargs: Mapping[str, Any]
) -> Tensor:
    """Queries (b, h, s, d) x (1 + attn_scale log(1 + floor((n + 1) / floor_scale))), in layers that
    are marked as `SCALED`; n is the number of a token in the whole sequence.
    """
    if attention.sp.size > 1 and _counts_tokens(module):
        raise NotImplementedError(
            f"{type(module).__name__} has {TUNING}: beyond floor_scale tokens its queries are "
            "scaled by positions that every rank counts from 0; call wf_transformers.apply(model, "
            "sp) once, after which they are those of the whole sequence"
        )
    if SCALED not in vars(module):
        return query
    layer: Any = module
    numbers = _numbers(attention, query, kwargs).float()
    scales = torch.log1p(torch.floor((numbers + 1.0) / layer.floor_scale)) * layer.attn_scale + 1.0
    return (query * scales[:, None]).to(query.dtype)


def _numbers(attention: Any, query: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    """(s,): the numbers of this rank's tokens in the whole sequence."""
    cache, sp, device = attention.cache, attention.sp, query.device
    if cache is None:
        whole = torch.arange(query.shape[2] * sp.size, device=device)
        return sp.shard(whole, 0, **attention.documents.current(kwargs))
    new = torch.arange(cache.length, cache.length + cache.new, device=device)
    return new if cache.length else sp.shard(new, 0)  # only a prompt is cut


def scale_by_position(model: nn.Module, handle: Any) -> None:
    """Have attention scale the queries that Llama 4 scales, until `handle.remove()`."""
    for module in model.modules():
        if _counts_tokens(module):
            handle.set(module, TUNING, False)
            handle.set(module, SCALED, True)
