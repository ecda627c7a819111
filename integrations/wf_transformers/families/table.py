"""The attention modules that do not use transformers' registry, and how they call our attention.

The table has a row for each class of attention modules. Most run their own forward, in which only
torch's `scaled_dot_product_attention` is replaced. For modules that never call it, the row has a
function that replaces one of their methods. Only modules of attached models are changed, until
`Handle.remove()`; their parameters and state dict stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from wf_transformers.attention.function import Attention, Window
from wf_transformers.families.forwards import (
    bias_by_distance,
    bloom,
    deepseek,
    falcon,
    forward_with_our_sdpa,
    method_attn,
    mpt,
    t5,
    umt5,
)
from wf_transformers.families.stacks import stacks_of
from wf_transformers.models import (
    REGISTRY,
    file_of,
    row_of,
    with_torch_attention,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRow:
    """How one class of attention modules, and its subclasses, call our attention."""

    method: str = "forward"
    """The method of the module that `function` replaces."""
    function: Callable[..., Any] = forward_with_our_sdpa
    window: Callable[[Any], Window] = lambda module: None
    """Module -> its sliding window, as in `Attention.__call__`."""
    in_stack: bool = False
    """Whether the row is for models that are cut inside only (stacks.py)."""
    attributes: Callable[[Any], Mapping[str, Any]] = lambda module: {}
    """Module -> attributes to set on it for `function`."""
    registry_attributes: Callable[[Any], Mapping[str, Any]] = lambda module: {}
    """Module -> attributes to set on it if its file uses the registry: its own forward runs."""


FULL: Mapping[str, Any] = MappingProxyType({"is_causal": False})


def _bert(module: Any) -> Mapping[str, Any]:
    """The attributes that transformers' sdpa subclass of BERT's attention has."""
    if module.is_decoder:
        raise NotImplementedError("config.is_decoder=True: BERT decoders are not supported")
    if module.position_embedding_type != "absolute":
        raise NotImplementedError(
            f"config.position_embedding_type={module.position_embedding_type!r} biases "
            "attention, which WallFacer lacks; only 'absolute' is supported"
        )
    return {**FULL, "dropout_prob": module.dropout.p, "require_contiguous_qkv": False}


def _qwen_window(module: Any) -> Window:
    config = module.config
    has_window = config.use_sliding_window and module.layer_idx >= config.max_window_layers
    return config.sliding_window if has_window else None


def _neo_window(module: Any) -> Window:
    config = module.config
    is_local = config.attention_layers[module.layer_id] == "local"
    return config.window_size if is_local else None


def _modernbert_window(module: Any) -> Window:
    window = getattr(module, "local_attention", (-1, -1))  # transformers 5 has no such attribute
    return None if window == (-1, -1) else window


def _modernbert(module: Any) -> Mapping[str, Any]:
    """Its forward reads in its config that it calls torch's attention."""
    return {**FULL, "config": with_torch_attention(module.config)}


def _slopes(alibi: Tensor) -> Mapping[str, Any]:
    """The slopes (h,) of ALiBi, from its bias for two keys (h, 1, 2)."""
    return {"alibi_slopes": (alibi[..., 1] - alibi[..., 0]).flatten()}


def _bloom_slopes(module: Any) -> Mapping[str, Any]:
    build = file_of(module).build_alibi_tensor
    return _slopes(build(torch.ones(1, 2), module.num_heads, torch.float32))


def _falcon_slopes(module: Any) -> Mapping[str, Any]:
    """Falcon multiplies its ALiBi by the softmax scale; without ALiBi it has rotary embeddings."""
    slopes = _bloom_slopes(module)["alibi_slopes"].double() * module.inv_norm_factor
    slopes = slopes if module.config.alibi else None
    return {
        "_use_sdpa": True,
        "config": with_torch_attention(module.config),
        "alibi_slopes": slopes,
    }


def _mpt_slopes(module: Any) -> Mapping[str, Any]:
    build = file_of(module).build_mpt_alibi_tensor
    return _slopes(build(module.n_heads, 2))


def _t5(module: Any) -> Mapping[str, Any]:
    """Every layer calls compute_bias, which returns None in layers without a bias."""
    if getattr(module, "pruned_heads", None):  # their bias would have to be left out
        raise NotImplementedError(f"pruned heads {sorted(module.pruned_heads)} of a T5")
    attributes = {"is_causal": module.is_decoder, "has_relative_attention_bias": True}
    return attributes | {"compute_bias": MethodType(bias_by_distance, module)}


def _clip(module: Any) -> Mapping[str, Any]:
    """Its text encoder is causal, which since 4.52 only its mask says."""
    return {"is_causal": hasattr(module.config, "vocab_size")}


BERT = AttentionRow(attributes=_bert)
CUT_INSIDE = AttentionRow(in_stack=True)
CLIP = AttentionRow(in_stack=True, attributes=_clip, registry_attributes=_clip)
METHOD = AttentionRow(method="_attn", function=method_attn)
QWEN2 = AttentionRow(window=_qwen_window)
T5 = AttentionRow(function=t5, in_stack=True, attributes=_t5, registry_attributes=_t5)
TABLE: Mapping[str, AttentionRow] = MappingProxyType(
    {
        **dict.fromkeys(("BertSelfAttention", "RobertaSelfAttention"), BERT),
        **dict.fromkeys(("XLMRobertaSelfAttention", "CamembertSelfAttention"), BERT),
        "ModernBertAttention": AttentionRow(window=_modernbert_window, attributes=_modernbert),
        **dict.fromkeys(("BartAttention", "MBartAttention", "WhisperAttention"), CUT_INSIDE),
        **dict.fromkeys(("Wav2Vec2Attention", "HubertAttention"), CUT_INSIDE),
        "CLIPAttention": CLIP,
        **dict.fromkeys(("T5Attention", "MT5Attention"), T5),
        "UMT5Attention": replace(T5, function=umt5),
        **dict.fromkeys(("OPTAttention", "JambaAttention", "StableLmAttention"), AttentionRow()),
        **dict.fromkeys(("NemotronAttention", "OlmoeAttention"), AttentionRow()),
        "RecurrentGemmaSdpaAttention": AttentionRow(),
        "PhimoeAttention": AttentionRow(window=lambda module: module.config.sliding_window),
        **dict.fromkeys(("Qwen2MoeAttention", "Qwen2VLAttention", "Qwen2_5_VLAttention"), QWEN2),
        **dict.fromkeys(("GPTJAttention", "CodeGenAttention"), METHOD),
        "GPTNeoSelfAttention": replace(METHOD, window=_neo_window),
        "FalconAttention": AttentionRow(function=falcon, attributes=_falcon_slopes),
        "BloomAttention": AttentionRow(function=bloom, attributes=_bloom_slopes),
        "MptAttention": AttentionRow(function=mpt, attributes=_mpt_slopes),
    }
)

ALIBI_MODELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "FalconModel": {"use_alibi": False},
        "BloomModel": {"build_alibi_tensor": lambda *_, **__: None},
    }
)
"""Attributes for models, so that they build no (s, s) tensors of ALiBi: attention has slopes."""

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            "SwitchTransformersAttention LongT5Attention WavLMAttention BeitSelfAttention "
            "BeitAttention Data2VecVisionSelfAttention Data2VecVisionAttention".split(),
            "adds a learned bias by relative positions to its scores",
        ),
        "DisentangledSelfAttention": "adds scores of learned relative positions to its own",
    }
)
"""Attention modules that we cannot replace, or whose registry call has more, and why."""

MLA: Mapping[str, Callable[..., Any]] = MappingProxyType({"DeepseekV3Attention": deepseek})
"""Attention modules that can send latents instead of keys and values, and the forward that does.
They use the registry: without `"latents": true` their own forward runs."""

BUILDS_MASKS = "MptModel"
"""The model that only takes masks (b, s), and must be called without one of ours."""


def modules_without_registry(model: nn.Module) -> list[Any]:
    """The attention modules in `model` that are in the table and do not use the registry."""
    return [m for m, _ in _rows_in(model) if not file_uses_registry(m)]


def _rows_in(model: nn.Module) -> list[tuple[Any, AttentionRow]]:
    """The attention modules in `model` that are in the table, with their rows."""
    in_stacks = {id(module) for stack in stacks_of(model) for module in stack.modules()}
    pairs = ((module, row_of(TABLE, module)) for module in model.modules())
    return [(m, row) for m, row in pairs if row and (id(m) in in_stacks or not row.in_stack)]


def file_uses_registry(module: nn.Module) -> bool:
    """Whether the file of a module's class uses transformers' registry."""
    return hasattr(file_of(module), REGISTRY)


def attribute_changes(module: Any, row: AttentionRow, attention: Attention) -> dict[str, Any]:
    """The attributes to set on a module of the table so that it calls `attention`."""
    if file_uses_registry(module):  # a window may show in its masks only
        window = None if hasattr(module, "sliding_window") else row.window(module)
        attributes = {"sliding_window": window} if window else {}
        return {**attributes, **row.registry_attributes(module)}
    return {
        "wallfacer": attention,
        "wallfacer_row": row,
        "is_causal": getattr(module, "is_causal", True),
        **row.attributes(module),
        row.method: MethodType(row.function, module),
    }


def changes_in(model: nn.Module, attention: Attention) -> list[tuple[nn.Module, dict[str, Any]]]:
    """(module, its `attribute_changes`) for every module in `model` that has any."""
    pairs = [(module, attribute_changes(module, row, attention)) for module, row in _rows_in(model)]
    for module in model.modules():
        attributes = row_of(ALIBI_MODELS, module) or {}
        pairs.append((module, {k: x for k, x in attributes.items() if hasattr(module, k)}))
    return pairs
