"""The families whose attention asks no registry of transformers, and how it calls us all the same.

One row a class of attention modules. Most run their own forward, in which torch's
`scaled_dot_product_attention` alone is ours: projections, rotary embeddings and the projection of
the result stay the model's. Where a module never calls that function, the row names a method that
does the same with ours. Only single modules of a model that was attached are changed, until
`Handle.remove()`; their parameters and state dict stay as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from wf_transformers.attention import Attention, Window
from wf_transformers.families.forwards import (
    bias_by_distance,
    bloom,
    by_torch,
    deepseek,
    falcon,
    file_of,
    method_attn,
    modernbert,
    mpt,
    t5,
    umt5,
)
from wf_transformers.families.stacks import stacks_of
from wf_transformers.models import REGISTRY, own_class, row_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What is to be known of one class of attention modules, and of its subclasses."""

    method: str = "forward"
    """What is replaced in a module, by `function`."""
    function: Callable[..., Any] = by_torch
    window: Callable[[Any], Window] = lambda module: None
    """Module -> the keys that a row sees: see `Attention.__call__`."""
    in_stack: bool = False
    """Whether it is ours only in models that are cut inside (stacks.py)."""
    attributes: Callable[[Any], Mapping[str, Any]] = lambda module: {}
    """Module -> what it must have for that forward, beside what it has."""
    asking: Callable[[Any], Mapping[str, Any]] = lambda module: {}
    """Module -> what it must have where its file asks the registry, and its own forward runs."""


FULL: Mapping[str, Any] = MappingProxyType({"is_causal": False})


def _bert(module: Any) -> Mapping[str, Any]:
    """What transformers' subclass sets, if this is what BERT supports with us.

    Raises:
        NotImplementedError: for a decoder, or relative position embeddings.
    """
    if module.is_decoder:
        raise NotImplementedError("config.is_decoder=True: BERT decoders are not supported")
    if module.position_embedding_type != "absolute":
        raise NotImplementedError(
            f"config.position_embedding_type={module.position_embedding_type!r} biases "
            "attention, which WallFacer lacks; only 'absolute' is supported"
        )
    return {**FULL, "dropout_prob": module.dropout.p, "require_contiguous_qkv": False}


def _clip(module: Any) -> Mapping[str, Any]:
    """Text is causal, and patches are not."""
    return {"is_causal": hasattr(module.config, "vocab_size")}


def _config_window(module: Any) -> Window:
    return getattr(module.config, "sliding_window", None)


def _qwen_window(module: Any) -> Window:
    config = module.config
    layers = config.use_sliding_window and module.layer_idx >= config.max_window_layers
    return config.sliding_window if layers else None


def _neo_window(module: Any) -> Window:
    config = module.config
    local = config.attention_layers[module.layer_id] == "local"
    return config.window_size if local else None


def _modernbert_window(module: Any) -> Window:
    sides = getattr(module, "local_attention", (-1, -1))  # transformers 5 has none
    return None if sides == (-1, -1) else sides


def _slopes(alibi: Tensor) -> Mapping[str, Any]:
    """From what a model adds to the scores of two keys, (h, 1, 2)."""
    return {"alibi_slopes": (alibi[..., 1] - alibi[..., 0]).flatten()}


def _bloom_slopes(module: Any) -> Mapping[str, Any]:
    build = file_of(module).build_alibi_tensor
    return _slopes(build(torch.ones(1, 2), module.num_heads, torch.float32))


def _falcon_slopes(module: Any) -> Mapping[str, Any]:
    """Falcon scales its ALiBi, too; without it there are rotary embeddings."""
    found = _bloom_slopes(module)["alibi_slopes"].double() * module.inv_norm_factor
    return {"_use_sdpa": True, "alibi_slopes": found if module.config.alibi else None}


def _mpt_slopes(module: Any) -> Mapping[str, Any]:
    build = file_of(module).build_mpt_alibi_tensor
    return _slopes(build(module.n_heads, 2))


def _t5(module: Any) -> Mapping[str, Any]:
    """Decoders are causal. All layers ask for a bias, and those without one have none.

    Raises:
        NotImplementedError: for heads that were pruned, whose bias is left out.
    """
    if getattr(module, "pruned_heads", None):
        raise NotImplementedError(f"pruned heads {sorted(module.pruned_heads)} of a T5")
    compute = {"compute_bias": MethodType(bias_by_distance, module)}
    return compute | {"is_causal": module.is_decoder, "has_relative_attention_bias": True}


CUT_INSIDE, T5 = Row(in_stack=True), Row(function=t5, in_stack=True, attributes=_t5, asking=_t5)
BERT = Row(attributes=_bert)
QWEN2, METHOD = Row(window=_qwen_window), Row(method="_attn", function=method_attn)
TABLE: Mapping[str, Row] = MappingProxyType(
    {
        **dict.fromkeys(("BertSelfAttention", "RobertaSelfAttention"), BERT),
        **dict.fromkeys(("XLMRobertaSelfAttention", "CamembertSelfAttention"), BERT),
        "ModernBertAttention": Row(
            function=modernbert, window=_modernbert_window, attributes=lambda _: FULL
        ),
        **dict.fromkeys(("BartAttention", "MBartAttention", "WhisperAttention"), CUT_INSIDE),
        "CLIPAttention": replace(CUT_INSIDE, attributes=_clip),
        **dict.fromkeys(("T5Attention", "MT5Attention"), T5),
        "UMT5Attention": replace(T5, function=umt5),
        **dict.fromkeys(("OPTAttention", "JambaAttention", "StableLmAttention"), Row()),
        **dict.fromkeys(("NemotronAttention", "OlmoeAttention"), Row()),
        "RecurrentGemmaSdpaAttention": Row(),
        "PhimoeAttention": Row(window=_config_window),
        **dict.fromkeys(("Qwen2MoeAttention", "Qwen2VLAttention", "Qwen2_5_VLAttention"), QWEN2),
        **dict.fromkeys(("GPTJAttention", "CodeGenAttention"), METHOD),
        "GPTNeoSelfAttention": replace(METHOD, window=_neo_window),
        "FalconAttention": Row(function=falcon, attributes=_falcon_slopes),
        "BloomAttention": Row(function=bloom, attributes=_bloom_slopes),
        "MptAttention": Row(function=mpt, attributes=_mpt_slopes),
    }
)

AROUND: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "FalconModel": {"use_alibi": False},
        "BloomModel": {"build_alibi_tensor": lambda *_, **__: None},
    }
)
"""Around such modules: what models are to have, so that they build no tensors of (s, s) elements
of their ALiBi, which attention is told of."""

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("SwitchTransformersAttention", "LongT5Attention"),
            "adds a learned bias by relative positions to its scores",
        ),
        "DisentangledSelfAttention": "adds scores of learned relative positions to its own",
    }
)
"""Attention modules that cannot be ours, and why."""

LATENTS: Mapping[str, Callable[..., Any]] = MappingProxyType({"DeepseekV3Attention": deepseek})
"""Attention modules that may send latents in place of keys and values, and the forward that does.
They ask the registry: without `"latents": true` their own forward runs."""

BUILDS_MASKS = frozenset({"MptModel"})
"""Models that take no mask but (b, s)."""


def builds_masks(model: nn.Module) -> bool:
    """Whether `model` is to be called without any mask."""
    return any(own_class(module).__name__ in BUILDS_MASKS for module in model.modules())


def unasking(model: nn.Module) -> list[Any]:
    """The attention modules in `model` that the table has, if their files ask no registry."""
    return [module for module, _ in _rows_in(model) if not asks(own_class(module))]


def _rows_in(model: nn.Module) -> list[tuple[Any, Row]]:
    """The attention modules in `model` that the table has, and their rows."""
    inside = {id(module) for stack in stacks_of(model) for module in stack.modules()}
    found = ((module, row_of(TABLE, module)) for module in model.modules())
    return [(m, row) for m, row in found if row and (id(m) in inside or not row.in_stack)]


def asks(kind: type) -> bool:
    """Whether the file of a class asks the registry."""
    return hasattr(sys.modules[kind.__module__], REGISTRY)


def changes(module: Any, row: Row, attention: Attention) -> dict[str, Any]:
    """What to set on a module of the table so that it calls `attention`.

    Raises:
        NotImplementedError: for a kind of it that cannot be spread.
    """
    if asks(own_class(module)):  # its masks alone tell of its window
        window = None if hasattr(module, "sliding_window") else row.window(module)
        return ({"sliding_window": window} if window else {}) | dict(row.asking(module))
    known = {"wallfacer": attention, "wallfacer_row": row}
    known["is_causal"] = getattr(module, "is_causal", True)
    return {**known, **row.attributes(module), row.method: MethodType(row.function, module)}


def changes_in(model: nn.Module, attention: Attention) -> list[tuple[nn.Module, dict[str, Any]]]:
    """The modules in `model` on which something is to be set, and what.

    Raises:
        NotImplementedError: as `changes`.
    """
    found = [(module, changes(module, row, attention)) for module, row in _rows_in(model)]
    around = ((module, row_of(AROUND, module) or {}) for module in model.modules())
    return found + [(m, {k: x for k, x in words.items() if hasattr(m, k)}) for m, words in around]
