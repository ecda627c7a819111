"""The families whose attention asks no registry of transformers, and how it calls us all the same.

One row a class of attention modules. Most run their own forward, in which torch's
`scaled_dot_product_attention` alone is ours: projections, rotary embeddings and the projection of
the result stay the model's. Where a module never calls that function, the row names a method that
does the same with ours. Only single modules of a model that was attached are changed, until
`Handle.remove()`; their parameters and state dict stay as they are.

# b batch, s this rank's rows, h heads, g key heads (g divides h), d head_dim
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from wf_transformers.attention import Attention, Window, refuse_words
from wf_transformers.models import REGISTRY


class _Ours(TorchFunctionMode):
    """Inside, torch's attention is that of `module.wallfacer`, over the ranks."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._module = module

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        ours = func is scaled_dot_product_attention
        return (self._attend if ours else func)(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """(b, h, s, d) each, and of the result. What is causal is told by the module."""
        module, row = self._module, row_of(self._module)
        groups = query.shape[1] // row.key_heads(module, key.shape[1])
        repeated = groups if key.shape[1] == query.shape[1] else 1
        out, _ = module.wallfacer(
            module,
            query,
            key[:, ::repeated],  # the model repeats heads, which need not be sent
            value[:, ::repeated],
            attn_mask,
            dropout_p,
            query.shape[-1] ** -0.5 if scale is None else scale,
            sliding_window=row.window(module),
            alibi_slopes=getattr(module, "alibi_slopes", None),
        )
        return out.transpose(1, 2)


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of the class that calls torch's attention, which is ours inside."""
    kind = _calling_class(type(self))
    given = inspect.signature(kind.forward).bind(self, *args, **kwargs).arguments
    refuse_words(type(self).__name__, given | {"past_key_value": None})  # the rows tell of one
    with _Ours(self):
        return kind.forward(self, *args, **kwargs)


def _calling_class(kind: type) -> Any:
    """Beside a class of transformers 4, its subclass that calls torch's attention."""
    found = [base for base in kind.__mro__ if base.__name__ in TABLE][0]
    return getattr(sys.modules[found.__module__], TABLE[found.__name__].sdpa or "", found)


def _attn(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    head_mask: Tensor | None = None,
) -> tuple[Tensor, None]:
    """The method of that name of GPT-J, GPT-Neo and CodeGen: (b, h, s, d) in and out."""
    row, dropout = row_of(self), self.attn_dropout.p if self.training else 0.0
    scale, window = 1 / float(getattr(self, "scale_attn", 1.0)), row.window(self)
    words = {"sliding_window": window, "head_mask": head_mask}
    out, _ = self.wallfacer(self, query, key, value, attention_mask, dropout, scale, **words)
    return out.transpose(1, 2), None


def _modernbert(self: Any, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor]:
    """ModernBertAttention.forward, by the one of its functions that calls torch's attention."""
    refuse_words(type(self).__name__, kwargs)
    file: Any = sys.modules[_calling_class(type(self)).__module__]
    qkv = self.Wqkv(hidden_states).unflatten(-1, (3, self.num_heads, self.head_dim))
    words = {"local_attention": self.local_attention, "rotary_emb": self.rotary_emb}
    size = {"bs": len(qkv), "dim": self.all_head_size}
    with _Ours(self):
        (out,) = file.sdpa_attention_forward(self, qkv, **words, **size, **kwargs)
    return (self.out_drop(self.Wo(out)),)


def _falcon(self: Any, hidden_states: Tensor, alibi: Any, *args: Any, **kwargs: Any) -> Any:
    """FalconAttention.forward, which has no rotary embeddings where there is something `alibi`."""
    return _forward(self, hidden_states, self.config.alibi or None, *args, **kwargs)


def _bloom(
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
    file: Any = sys.modules[_calling_class(type(self)).__module__]
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
    return file.dropout_add(projected, residual, self.hidden_dropout, self.training), layer_past


def _mpt(
    self: Any,
    hidden_states: Tensor,
    position_bias: Tensor | None,
    past_key_value: Any = None,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, None, None]:
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
    return self.out_proj(out.flatten(2)), None, None


def _no_window(_: Any) -> Window:
    return None


def _given_key_heads(_: Any, given: int) -> int:
    return given


def _nothing(_: Any) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What is to be known of one class of attention modules, and of its subclasses."""

    sdpa: str | None = None
    """The subclass that calls torch's attention, whose forward all of them run. None: itself."""
    method: str = "forward"
    """What is replaced in a module, by `function`."""
    function: Callable[..., Any] = _forward
    causal: bool | None = None
    """None: as the module's `is_causal` says."""
    window: Callable[[Any], Window] = _no_window
    """Module -> the keys that a row sees: see `Attention.__call__`."""
    key_heads: Callable[[Any, int], int] = _given_key_heads
    """(module, key heads that it hands over) -> those before it repeats them for every query."""
    attributes: Callable[[Any], Mapping[str, Any]] = _nothing
    """Module -> what it must have for that forward, beside what it has."""


def _repeats(module: Any, given: int) -> int:
    return given // getattr(module, "num_key_value_groups", 1)


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
    return {"dropout_prob": module.dropout.p, "require_contiguous_qkv": False}


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
    return None if module.local_attention == (-1, -1) else module.local_attention


def _slopes(alibi: Tensor) -> Mapping[str, Any]:
    """From what a model adds to the scores of two keys, (h, 1, 2)."""
    return {"alibi_slopes": (alibi[..., 1] - alibi[..., 0]).flatten()}


def _bloom_slopes(module: Any) -> Mapping[str, Any]:
    build = sys.modules[_calling_class(type(module)).__module__].build_alibi_tensor
    return _slopes(build(torch.ones(1, 2), module.num_heads, torch.float32))


def _falcon_slopes(module: Any) -> Mapping[str, Any]:
    """Falcon scales its ALiBi, too; without it there are rotary embeddings."""
    found = _bloom_slopes(module)["alibi_slopes"].double() * module.inv_norm_factor
    return {"_use_sdpa": True, "alibi_slopes": found if module.config.alibi else None}


def _mpt_slopes(module: Any) -> Mapping[str, Any]:
    build = sys.modules[_calling_class(type(module)).__module__].build_mpt_alibi_tensor
    return _slopes(build(module.n_heads, 2))


def _bert_like(name: str) -> Row:
    return Row(sdpa=f"{name}SdpaSelfAttention", causal=False, attributes=_bert)


def _decoder(name: str, window: Callable[[Any], Window] = _no_window) -> Row:
    return Row(sdpa=f"{name}SdpaAttention", key_heads=_repeats, window=window)


TABLE: Mapping[str, Row] = MappingProxyType(
    {
        "BertSelfAttention": _bert_like("Bert"),
        "RobertaSelfAttention": _bert_like("Roberta"),
        "XLMRobertaSelfAttention": _bert_like("XLMRoberta"),
        "CamembertSelfAttention": _bert_like("Camembert"),
        "ModernBertAttention": Row(function=_modernbert, causal=False, window=_modernbert_window),
        "OPTAttention": _decoder("OPT"),
        "JambaAttention": _decoder("Jamba"),
        "RecurrentGemmaSdpaAttention": Row(key_heads=_repeats),
        "StableLmAttention": _decoder("StableLm"),
        "NemotronAttention": _decoder("Nemotron"),
        "OlmoeAttention": _decoder("Olmoe"),
        "PhimoeAttention": _decoder("Phimoe", _config_window),
        "Qwen2MoeAttention": _decoder("Qwen2Moe", _qwen_window),
        "GPTJAttention": Row(method="_attn", function=_attn),
        "CodeGenAttention": Row(method="_attn", function=_attn),
        "FalconAttention": Row(function=_falcon, attributes=_falcon_slopes),
        "BloomAttention": Row(function=_bloom, attributes=_bloom_slopes),
        "MptAttention": Row(function=_mpt, attributes=_mpt_slopes),
        "GPTNeoSelfAttention": Row(method="_attn", function=_attn, window=_neo_window),
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

BUILDS_MASKS = frozenset({"MptModel"})
"""Models that take no mask but (b, s)."""


def changes_around(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """(module, name, value): what to set in `model` beside its attention modules."""
    return [
        (module, name, value)
        for module in model.modules()
        for name, value in AROUND.get(type(module).__name__, {}).items()
        if hasattr(module, name) and not asks(type(module))
    ]


def builds_masks(model: nn.Module) -> bool:
    """Whether `model` is to be called without any mask."""
    return any(type(module).__name__ in BUILDS_MASKS for module in model.modules())


def row_of(module: nn.Module) -> Row:
    """The row of a module that the table has."""
    return next(TABLE[base.__name__] for base in type(module).__mro__ if base.__name__ in TABLE)


def unasking(model: nn.Module) -> list[Any]:
    """The attention modules in `model` that the table has, if their files ask no registry."""
    return [module for module in model.modules() if _is_known(type(module))]


def _is_known(kind: type) -> bool:
    for base in kind.__mro__:
        if base.__name__ in TABLE and base.__module__.startswith("transformers.models."):
            return not asks(base)
    return False


def asks(kind: type) -> bool:
    """Whether the file of a class asks the registry."""
    return hasattr(sys.modules[kind.__module__], REGISTRY)


def changes(module: Any, attention: Attention) -> dict[str, Any]:
    """What to set on such a module so that it calls `attention`.

    Raises:
        NotImplementedError: for a kind of it that cannot be spread.
    """
    row = row_of(module)
    causal = getattr(module, "is_causal", True) if row.causal is None else row.causal
    own = {row.method: MethodType(row.function, module)}
    return {"wallfacer": attention, "is_causal": causal, **row.attributes(module), **own}
