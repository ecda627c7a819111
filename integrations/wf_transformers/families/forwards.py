"""What attention modules run in place of a method of theirs that never asks for ours.

`self.wallfacer` is the `Attention`, `self.wallfacer_row` the row of the module (families.py).

# b batch, s this rank's rows, h heads, g key heads (g divides h), d head_dim
"""

from __future__ import annotations

import inspect
import re
import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wf_transformers.attention import refuse_words
from wf_transformers.calls import CACHES
from wf_transformers.models import own_class
from wf_transformers.replace import InPlaceOfTorchAttention


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
    """In place of torch's attention: (b, h, s, d) each. What is causal is told by the module."""
    groups = getattr(module, "num_key_value_groups", 1)
    repeated = groups if key.shape[1] == query.shape[1] else 1
    out, _ = module.wallfacer(
        module,
        query,
        key[:, ::repeated],  # the model repeats heads, which need not be sent
        value[:, ::repeated],
        attn_mask,
        dropout_p,
        query.shape[-1] ** -0.5 if scale is None else scale,
        sliding_window=module.wallfacer_row.window(module),
        alibi_slopes=getattr(module, "alibi_slopes", None),
    )
    return out.transpose(1, 2)


def by_torch(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of the class that calls torch's attention, which is ours inside."""
    kind = _sdpa_class(self)
    given = inspect.signature(kind.forward).bind(self, *args, **kwargs).arguments
    refuse_words(type(self).__name__, given | {"past_key_value": None})  # the rows tell of one
    with InPlaceOfTorchAttention(partial(attend, self)):
        return kind.forward(self, *args, **kwargs)


def _sdpa_class(module: Any) -> Any:
    """Of BertSelfAttention and its subclasses BertSdpaSelfAttention, if their file has it."""
    names = (
        re.sub("(Self)?Attention$", r"Sdpa\g<0>", k.__name__) for k in own_class(module).__mro__
    )
    known = (getattr(file_of(module), name, None) for name in names if "Sdpa" in name)
    return next((kind for kind in known if kind is not None), own_class(module))


def file_of(module: Any) -> Any:
    """The file of transformers that a module's class, or what it derives from, stands in."""
    return sys.modules[own_class(module).__module__]


def method_attn(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    head_mask: Tensor | None = None,
) -> tuple[Tensor, None]:
    """The method of that name of GPT-J, GPT-Neo and CodeGen: (b, h, s, d) in and out."""
    dropout, window = self.attn_dropout.p if self.training else 0.0, self.wallfacer_row.window(self)
    scale = 1 / float(getattr(self, "scale_attn", 1.0))
    words = {"sliding_window": window, "head_mask": head_mask}
    out, _ = self.wallfacer(self, query, key, value, attention_mask, dropout, scale, **words)
    return out.transpose(1, 2), None


def modernbert(self: Any, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor]:
    """ModernBertAttention.forward, by the one of its functions that calls torch's attention."""
    refuse_words(type(self).__name__, kwargs)
    qkv = self.Wqkv(hidden_states).unflatten(-1, (3, self.num_heads, self.head_dim))
    words = {"local_attention": self.local_attention, "rotary_emb": self.rotary_emb}
    size = {"bs": len(qkv), "dim": self.all_head_size}
    with InPlaceOfTorchAttention(partial(attend, self)):
        (out,) = file_of(self).sdpa_attention_forward(self, qkv, **words, **size, **kwargs)
    return (self.out_drop(self.Wo(out)),)


def falcon(self: Any, hidden_states: Tensor, alibi: Any, *args: Any, **kwargs: Any) -> Any:
    """FalconAttention.forward, which has no rotary embeddings where there is something `alibi`."""
    return by_torch(self, hidden_states, self.config.alibi or None, *args, **kwargs)


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
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    out, _ = self.wallfacer(
        self,
        query,
        key,
        value,
        attention_mask,
        self.attention_dropout.p if self.training else 0.0,
        self.inv_norm_factor,
        alibi_slopes=self.alibi_slopes,
        head_mask=head_mask,
        output_attentions=output_attentions,
    )
    projected = self.dense(out.flatten(2))
    add = file_of(self).dropout_add
    return add(projected, residual, self.hidden_dropout, self.training), layer_past


def mpt(
    self: Any,
    hidden_states: Tensor,
    position_bias: Tensor | None,
    attention_mask: Tensor | None = None,
    **words: Any,
) -> tuple[Any, ...]:
    """MptAttention.forward: (b, s, width); in its masks True is hidden."""
    qkv = self.Wqkv(hidden_states)
    if self.clip_qkv:
        qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (
        x.unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2) for x in qkv.chunk(3, dim=-1)
    )
    out, _ = self.wallfacer(
        self,
        query,
        key,
        value,
        None if attention_mask is None else ~attention_mask,
        self.attn_dropout_p if self.training else 0.0,
        self.softmax_scale,
        alibi_slopes=self.alibi_slopes,
    )
    gives_none = any(key in words for key in CACHES)  # back, as of transformers 5
    return self.out_proj(out.flatten(2)), None, *(() if gives_none else (None,))


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
    **_: Any,
) -> tuple[Any, ...]:
    """T5Attention.forward: (b, s, width). The first layer of a stack makes the bias for all."""
    across = key_value_states is not None
    heads, seen = (self.n_heads, -1), key_value_states if across else hidden_states
    query, key, value = (
        x.unflatten(-1, heads).transpose(1, 2)
        for x in (self.q(hidden_states), self.k(seen), self.v(seen))
    )
    if past_key_value is not None and not across:  # one that is not empty shows by its rows
        cache, words = past_key_value.self_attention_cache, {"cache_position": cache_position}
        key, value = cache.update(key, value, self.layer_idx, words)
    bias = self.compute_bias() if position_bias is None else position_bias
    out, _none = self.wallfacer(
        self,
        query,
        key,
        value,
        mask,
        self.dropout if self.training else 0.0,
        1.0,
        position_bias=bias,
        layer_head_mask=layer_head_mask,
        output_attentions=output_attentions,
    )
    return self.o(out.flatten(2)), past_key_value, bias


def umt5(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    past_key_value: Any = None,
    attention_mask: Tensor | None = None,
    **words: Any,
) -> tuple[Any, ...]:
    """UMT5Attention.forward, where every layer has a bias of its own."""
    states = attention_mask, encoder_hidden_states, None, past_key_value
    out, cache, _ = t5(self, hidden_states, *states, **words)
    return out, None, cache


def bias_by_distance(self: Any, *_: Any, **__: Any) -> Tensor | None:
    """In place of a T5's compute_bias: (h, 2 n - 1), as attention takes it; None without one.

    Its buckets are all one beyond some distance, so this has the row of a token that far from
    either end.
    """
    if getattr(self, "relative_attention_bias", None) is None:
        return None
    side = max(self.relative_attention_num_buckets, self.relative_attention_max_distance)
    return own_class(self).compute_bias(self, side + 1, 2 * side + 1)[0, :, -1]


def deepseek(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    past_key_value: Any = None,
    past_key_values: Any = None,  # transformers 5's name
    cache: Any = None,  # since 5.24
    **words: Any,
) -> tuple[Tensor, None]:
    """DeepseekV3Attention.forward whose latents are sent, not keys and values: (b, s, width)."""
    if self.q_lora_rank is None:
        query = self.q_proj(hidden_states)
    else:
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
    sizes = self.kv_lora_rank, self.qk_rope_head_dim
    latents, shared = self.kv_a_proj_with_mqa(hidden_states).split(sizes, -1)
    latents, shared = self.kv_a_layernorm(latents).unsqueeze(1), shared.unsqueeze(1)
    query = query.unflatten(-1, (-1, self.qk_head_dim)).transpose(1, 2)
    own, turned = query.split((self.qk_nope_head_dim, self.qk_rope_head_dim), -1)
    kind = "_interleave" if self.config.rope_interleave else ""
    rotate = getattr(file_of(self), f"apply_rotary_pos_emb{kind}")
    turned, shared = rotate(turned, shared, *position_embeddings)
    known = (one for one in (past_key_value, past_key_values, cache) if one is not None)
    if (cache := next(known, None)) is not None:
        latents, shared = cache.update(latents, shared, self.layer_idx)
    out, _ = self.wallfacer(
        self,
        torch.cat((own, turned), -1),
        shared,
        latents,
        attention_mask,
        self.attention_dropout if self.training else 0.0,
        self.scaling,
        kv_up=_weight(self.kv_b_proj, latents).unflatten(0, (query.shape[1], -1)),
        **words,
    )
    return self.o_proj(out.flatten(2)), None


def _weight(linear: nn.Module, like: Tensor) -> Tensor:
    """(out, in) of a linear without bias, of what is in it (LoRA) and gathers it (ZeRO 3), too.

    It is what it makes of the identity: in five dimensions, which no module's tokens have, so that
    verify takes its rows for none.

    Raises:
        NotImplementedError: for dropout in it, which falls on tokens, and there are none.
    """
    if any(isinstance(m, nn.Dropout) and m.p for m in linear.modules()):
        raise NotImplementedError(
            f'"latents": true needs a kv_b_proj without dropout, got {linear}: set lora_dropout=0, '
            "or leave kv_b_proj out of the adapter's target_modules"
        )
    unit = torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
    return linear(unit[None, None, None])[0, 0, 0].T
