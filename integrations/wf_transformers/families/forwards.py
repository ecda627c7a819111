"""Replacements for methods of attention modules that do not use transformers' registry.

`self.wallfacer` is the `Attention`, `self.wallfacer_row` the module's row in table.py.

Shapes: b batch, s rows of this rank, h heads, g key heads (g divides h), d head_dim.
"""

from __future__ import annotations

import inspect
import re
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate
from transformers import cache_utils

from wf_transformers.calls import CACHE_NAMES, CACHES, refuse_unsupported
from wf_transformers.models import file_of, transformers_class
from wf_transformers.replace import InPlaceOfTorchAttention

RETURNS_CACHE = not hasattr(cache_utils, "CacheLayerMixin")
"""Before 4.54, T5's attention returns its cache, too."""


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Replaces torch's `scaled_dot_product_attention` inside `module`: (b, h, s, d) each.

    Whether attention is causal follows from the module, not from `is_causal`.
    """
    groups = getattr(module, "num_key_value_groups", 1)
    repeats = groups if key.shape[1] == query.shape[1] else 1
    out, _ = module.wallfacer(
        module,
        query,
        key[:, ::repeats],  # drops the copies of key heads, so that they are not sent
        value[:, ::repeats],
        attn_mask,
        dropout_p,
        query.shape[-1] ** -0.5 if scale is None else scale,
        sliding_window=module.wallfacer_row.window(module),
        alibi_slopes=getattr(module, "alibi_slopes", None),
    )
    return out.transpose(1, 2)


def forward_with_our_sdpa(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of the module's sdpa class, with our attention instead of torch's."""
    cls = _sdpa_class(self)
    arguments = inspect.signature(cls.forward).bind(self, *args, **kwargs).arguments
    arguments["past_key_value"] = None  # a cache that is not empty shows by the number of keys
    refuse_unsupported(type(self).__name__, arguments)
    with InPlaceOfTorchAttention(partial(attend, self)):
        return cls.forward(self, *args, **kwargs)


def _sdpa_class(module: Any) -> Any:
    """The class of the module's file that calls torch's attention, else the module's class.

    For BertSelfAttention and its subclasses that is BertSdpaSelfAttention.
    """
    module_class = transformers_class(module)
    for cls in module_class.__mro__:
        name = re.sub("(Self)?Attention$", r"Sdpa\g<0>", cls.__name__)
        sdpa_class = getattr(file_of(module), name, None) if "Sdpa" in name else None
        if sdpa_class is not None:
            return sdpa_class
    return module_class


def method_attn(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    head_mask: Tensor | None = None,
) -> tuple[Tensor, None]:
    """`_attn` of GPT-J, GPT-Neo and CodeGen: (b, h, s, d) in and out."""
    dtype = value.dtype  # that of the weights: float32 rotary tables make q and k float32
    query, key = query.to(dtype), key.to(dtype)
    dropout = self.attn_dropout.p if self.training else 0.0
    scale = 1 / float(getattr(self, "scale_attn", 1.0))
    options = {"sliding_window": self.wallfacer_row.window(self), "head_mask": head_mask}
    out, _ = self.wallfacer(self, query, key, value, attention_mask, dropout, scale, **options)
    return out.transpose(1, 2), None


def falcon(self: Any, hidden_states: Tensor, alibi: Any, *args: Any, **kwargs: Any) -> Any:
    """FalconAttention.forward: it applies rotary embeddings only if `alibi` is None."""
    return forward_with_our_sdpa(self, hidden_states, self.config.alibi or None, *args, **kwargs)


def bloom(
    self: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: None,
    attention_mask: Tensor | None,
    layer_past: Any = None,
    head_mask: Tensor | None = None,
    output_attentions: bool = False,
    **_: Any,
) -> tuple[Tensor, Any]:
    """BloomAttention.forward: (b, s, width)."""
    qkv = self._reshape(self.query_key_value(hidden_states))
    dropout = self.attention_dropout.p if self.training else 0.0
    options = {"head_mask": head_mask, "output_attentions": output_attentions}
    options |= {"alibi_slopes": self.alibi_slopes}
    out, _ = self.wallfacer(self, *qkv, attention_mask, dropout, self.inv_norm_factor, **options)
    projected = self.dense(out.flatten(2))
    dropout_add = file_of(self).dropout_add
    return dropout_add(projected, residual, self.hidden_dropout, self.training), layer_past


def mpt(
    self: Any,
    hidden_states: Tensor,
    position_bias: Tensor | None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """MptAttention.forward: (b, s, width). True in its masks means hidden."""
    qkv = self.Wqkv(hidden_states)
    if self.clip_qkv:
        qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    qkv = qkv.unflatten(-1, (3, self.n_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
    mask = None if attention_mask is None else ~attention_mask
    dropout = self.attn_dropout_p if self.training else 0.0
    options = {"alibi_slopes": self.alibi_slopes}
    out, _ = self.wallfacer(self, *qkv, mask, dropout, self.softmax_scale, **options)
    no_cache = () if any(key in kwargs for key in CACHES) else (None,)  # not in transformers 5
    return self.out_proj(out.flatten(2)), None, *no_cache


def t5(
    self: Any,
    hidden_states: Tensor,
    mask: Tensor | None = None,
    key_value_states: Tensor | None = None,
    position_bias: Tensor | None = None,
    past_key_value: Any = None,
    layer_head_mask: Tensor | None = None,
    output_attentions: bool = False,
    cache_position: Tensor | None = None,
    past_key_values: Any = None,
    **_: Any,
) -> tuple[Any, ...]:
    """T5Attention.forward: (b, s, width). The first layer of a stack computes the bias for all."""
    is_cross = key_value_states is not None
    key_states = key_value_states if is_cross else hidden_states
    query, key, value = (
        x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        for x in (self.q(hidden_states), self.k(key_states), self.v(key_states))
    )
    # A cache that is not empty gives more keys than queries, which our attention refuses.
    cache = past_key_value if past_key_values is None else past_key_values  # since 4.56
    if cache is not None and not is_cross:
        states = {"cache_position": cache_position}
        key, value = cache.self_attention_cache.update(key, value, self.layer_idx, states)
    bias = self.compute_bias() if position_bias is None else position_bias
    dropout = self.dropout if self.training else 0.0
    options = {"layer_head_mask": layer_head_mask, "output_attentions": output_attentions}
    options |= {"position_bias": bias}
    out, _none = self.wallfacer(self, query, key, value, mask, dropout, 1.0, **options)
    return self.o(out.flatten(2)), *((cache,) if RETURNS_CACHE else ()), bias


def umt5(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    past_key_value: Any = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """UMT5Attention.forward, in which every layer computes its own bias."""
    arguments = (attention_mask, encoder_hidden_states, None, past_key_value)
    out, *cache, _ = t5(self, hidden_states, *arguments, **kwargs)
    return out, None, *cache


def bias_by_distance(self: Any, *_: Any, **__: Any) -> Tensor | None:
    """Replaces T5's compute_bias: (h, 2 n - 1) by distance; None in a layer without a bias.

    All distances beyond some maximum share a bucket. So the biases of one query with that many keys
    on both sides hold every value.
    """
    if getattr(self, "relative_attention_bias", None) is None:
        return None
    distance = max(self.relative_attention_num_buckets, self.relative_attention_max_distance)
    compute_bias = transformers_class(self).compute_bias
    return compute_bias(self, distance + 1, 2 * distance + 1)[0, :, -1]


def deepseek(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """DeepseekV3Attention.forward that sends latents, not keys and values: (b, s, width)."""
    if self.q_lora_rank is None:
        query = self.q_proj(hidden_states)
    else:
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
    query = query.unflatten(-1, (-1, self.qk_head_dim)).transpose(1, 2)
    q_nope, q_rope = query.split((self.qk_nope_head_dim, self.qk_rope_head_dim), -1)
    compressed = self.kv_a_proj_with_mqa(hidden_states)
    latents, k_rope = compressed.split((self.kv_lora_rank, self.qk_rope_head_dim), -1)
    latents, k_rope = self.kv_a_layernorm(latents).unsqueeze(1), k_rope.unsqueeze(1)
    suffix = "_interleave" if self.config.rope_interleave else ""
    apply_rotary = getattr(file_of(self), f"apply_rotary_pos_emb{suffix}")
    q_rope, k_rope = apply_rotary(q_rope, k_rope, *position_embeddings)
    for cache in (kwargs.pop(name, None) for name in CACHE_NAMES):
        if cache is not None:
            latents, k_rope = cache.update(latents, k_rope, self.layer_idx)
    kv_up = weight_of(self.kv_b_proj, latents).unflatten(0, (query.shape[1], -1))
    latents = read_by_all_heads(self.kv_b_proj, latents)
    qkv = torch.cat((q_nope, q_rope), -1), k_rope, latents
    dropout, options = self.attention_dropout if self.training else 0.0, kwargs | {"kv_up": kv_up}
    out, _ = self.wallfacer(self, *qkv, attention_mask, dropout, self.scaling, **options)
    return self.o_proj(out.flatten(2)), None


def weight_of(linear: nn.Module, inputs: Tensor) -> Tensor:
    """(out, in): the weight of a linear without bias, with LoRA, and gathered under ZeRO 3.

    It is linear(identity), with the size, dtype and device of `inputs` (..., in). The identity has
    five dimensions, so that `verify` does not mistake its rows for tokens.

    Raises:
        NotImplementedError: for dropout inside: it would drop weights, not elements of tokens.
    """
    if any(isinstance(m, nn.Dropout) and m.p for m in linear.modules()):
        raise NotImplementedError(
            f"sending latents needs a kv_b_proj without dropout, got {linear}: set lora_dropout=0, "
            "or leave kv_b_proj out of the adapter's target_modules"
        )
    identity = torch.eye(inputs.shape[-1], dtype=inputs.dtype, device=inputs.device)
    return linear(identity[None, None, None])[0, 0, 0].T


def read_by_all_heads(linear: nn.Module, x: Tensor) -> Tensor:
    """x, whose gradient is summed over the ranks of tensor parallelism, as that of the input of
    `linear` would be: a rank has some of the heads that read it."""
    weight = getattr(linear, "weight", None)  # FSDP1 makes it a plain tensor, no parameter
    if not isinstance(weight, DTensor) or not weight.placements[-1].is_shard():
        return x
    mesh = weight.device_mesh
    if mesh.ndim == 1 and isinstance(linear, FSDPModule):
        return x
    names = mesh.mesh_dim_names
    mesh = mesh if mesh.ndim == 1 or names is None else mesh[names[-1]]
    replicated = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return replicated.to_local(grad_placements=[Partial()])
