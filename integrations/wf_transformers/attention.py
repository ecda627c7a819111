"""The function that a transformers model calls in place of its own attention."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import FrameType, MappingProxyType
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from wf_backends import SequenceParallel
from wf_backends._compile import eager
from wf_backends.comm import Shared
from wf_backends.schedule import SLICE_WORDS
from wf_transformers.calls import ON_ONE_PROCESS
from wf_transformers.documents import Documents
from wf_transformers.masks import MaskCheck, padding_of
from wf_transformers.models import refuse_varying_rope

# Keyword arguments of models that change attention in a way that no kernel of ours knows.
UNSUPPORTED: Mapping[str, str] = MappingProxyType(
    {
        "head_mask": "head masks",
        "layer_head_mask": "head masks",
        "output_attentions": "output_attentions=True: attention weights are never formed",
        "encoder_hidden_states": "cross attention",
        "past_key_value": "a KV cache",
    }
)

SCORES: Mapping[str, str] = MappingProxyType(
    {
        "softcap": "softcap",  # scores are softcap tanh(scores / softcap)
        "s_aux": "sinks",  # (h,) of the heads
        "alibi_slopes": "alibi_slopes",  # (h,) by which scores fall with the distance
        "position_bias": "position_bias",  # (h, 2 n - 1) by the distance of key and query
        "kv_up": "kv_up",  # key and value are latents (b, 1, s, ...)
    }
)
"""What layers say of their scores, and what `SequenceParallel.attention` calls it."""

Window = int | tuple[int, int] | None
IN_STACK = "wallfacer_stack"
"""Of layers in models that are cut inside: "self" or "cross". Their masks are whole."""
BOTH_SIDES = ("ModernBertAttention",)
"""Layers of transformers 5 of whose window w it is known that rows see w - 1 on either side."""


class Attention(Shared):
    """sp.attention in the words of transformers' attention interface.

    One object per SequenceParallel, called by every layer of every model that uses it.
    """

    def __init__(self, sp: SequenceParallel, name: str = "") -> None:
        self.sp = sp
        self.name = name
        """In transformers' registry; "" if it is not there."""
        self.documents = Documents()
        self.cut_by_heads: WeakSet[nn.Module] = WeakSet()
        """Models that take whole batches, of which the model inside is cut: see heads.py."""
        self.asked = False
        """Whether a layer has called since somebody last set this to False."""
        self.logits_are_whole = False
        """Whether the running call's labels are whole, and so are the logits: see own_loss.py."""
        self.drops = True
        """Whether layers that ask for dropout get it."""
        self._check_mask = MaskCheck()
        self._layers: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: Window | Literal["own"] = "own",
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Exact attention of this rank's rows over the whole sequence, for the layer `module`.

        Args:
            query: (b, h, s, d), this rank's rows. key, value: (b, g, s, d), g divides h.
            attention_mask: see `MaskCheck`.
            dropout: of the weights, drawn anew in each call.
            scaling: factor of the scores; None is the layer's own rule.
            sliding_window: the keys that a row sees, with its own; or (left, right) beside that;
                None for all. "own": the layer's attribute of that name, if it has one.
            kwargs: those of `SCORES`; `cu_seqlens`, the borders of packed documents, or a mask in
                slices, as host integers, global; what changes nothing is ignored.

        Returns:
            out (b, s, h, d), and None in place of the attention weights.

        Raises:
            NotImplementedError: for what `UNSUPPORTED` names, and rows that were not cut.
            ValueError: for a mask that says more than causal or full attention does.
        """
        self.asked = True
        if not torch.compiler.is_compiling() and _was_asked_for_weights(module, sys._getframe(1)):
            kwargs["output_attentions"] = True
        self._check(module, query, key, kwargs)
        # GPT-2 of transformers 4 says is_causal=False of a causal layer for one row or any mask.
        inferred = attention_mask is not None or query.shape[2] == 1
        causal = _is_causal(module, is_causal if is_causal or not inferred else None)
        window = _window(module, sliding_window, causal)
        q, k, v = (_as_autocast(x).transpose(1, 2) for x in (query, key, value))
        words = {ours: kwargs[its] for its, ours in SCORES.items() if kwargs.get(its) is not None}
        words |= self._mask_words(module, attention_mask, causal, window, kwargs)
        words["softmax_scale"] = _scale(module, scaling, query.shape[-1])
        dropout_p = dropout if self.drops else 0.0
        return self._attend(module, q, k, v, **words, dropout_p=dropout_p), None

    def _check(
        self, module: nn.Module, query: Tensor, key: Tensor, kwargs: Mapping[str, Any]
    ) -> None:
        """Refuse what a layer asks for and WallFacer lacks, and rows that nobody cut."""
        _refuse(module, query, key, kwargs)
        if self.sp.size > 1:
            layer = type(module).__name__
            refuse_varying_rope(layer, getattr(module, "config", None))
            self.documents.check_rows(layer, query.shape[2])

    def _mask_words(
        self,
        module: nn.Module,
        mask: Tensor | None,
        causal: bool,
        window: tuple[int, int] | None,
        given: dict[str, Any],
    ) -> dict[str, Any]:
        """What sp.attention is told of the mask."""
        place, running = getattr(module, IN_STACK, None), self.documents.running
        seqlen = running.seqlen if running else None
        if place is None:
            self._check_mask(mask, causal, _built_window(module, window))
            told = self.documents.current(given)
            if SLICE_WORDS[0] in told:
                _refuse_window(module, window)
                return {**told}
            window = window or (-1, -1)
            return {"causal": causal, "window_size": window, "seqlen": seqlen, **told}
        causal = causal and place != "cross"
        lengths = padding_of(mask, causal)
        if lengths is None:
            return {"causal": causal, "seqlen": seqlen}
        return {"seqlen": seqlen, "lengths": lengths}

    @eager
    def _attend(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: Sequence[int] | None = None,
        **words: Any,
    ) -> Tensor:
        """sp.attention by the layer's name: read here, or the compiler would tell layers apart.

        Args:
            lengths: how many keys the samples have. They are attended one after the other, because
                masks hold for all samples of a call.
        """
        name = self._layers.get(module)
        if name is None:
            name = f"{type(module).__name__} {getattr(module, 'layer_idx', '')}"
        if lengths is None:
            return self.sp.attention(q, k, v, **words, name=name)
        rows: Any = [(0, words["seqlen"])]
        seen = [{"k_ranges": [(0, length)], "attn_mask_types": ["full"]} for length in lengths]
        samples = zip(*(x.split(1) for x in (q, k, v)), seen, strict=True)
        return torch.cat(
            [
                self.sp.attention(*tensors, **words, **keys, q_ranges=rows, name=name)
                for *tensors, keys in samples
            ]
        )

    def name_layers(self, model: nn.Module) -> None:
        """Know the layers of a model by their names there."""
        self._layers.update((module, name) for name, module in model.named_modules())


def _as_autocast(x: Tensor) -> Tensor:
    """As torch's own attention has it under torch.autocast, which leaves float64 alone."""
    device = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


def _was_asked_for_weights(module: nn.Module, caller: FrameType) -> bool:
    """Whether the layer that calls was asked for attention weights and does not say so.

    GPT-2 and GPT-NeoX of transformers 4 take `output_attentions` and pass it to nobody: it is
    nowhere but among the arguments of their forward. In GPT-2 of transformers 5 the model keeps it
    to itself: only what collects a model's outputs knows of it.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    if collector is not None and "attentions" in (collector.get() or ()):
        return True
    code = caller.f_code
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if "output_attentions" not in arguments:
        return False
    values = caller.f_locals
    return values.get("self") is module and bool(values["output_attentions"])


def refuse_words(layer: str, words: Mapping[str, Any]) -> None:
    """Refuse arguments of an attention layer that no kernel of ours knows.

    Raises:
        NotImplementedError: naming the layer and what it asks for.
    """
    for name, what in UNSUPPORTED.items():
        if words.get(name) is not None and words[name] is not False:
            raise NotImplementedError(f"{layer} asks for {what}, which WallFacer lacks")


def _refuse(module: nn.Module, query: Tensor, key: Tensor, kwargs: Mapping[str, Any]) -> None:
    layer, config = type(module).__name__, getattr(module, "config", None)
    refuse_words(layer, kwargs)
    bias = kwargs.get("position_bias")
    if bias is not None and bias.dim() != 2:
        raise NotImplementedError(f"{layer} asks for an attention bias, which WallFacer lacks")
    if kwargs.get("cu_seq_lens_q") is not None:
        raise ValueError(
            "cu_seq_lens_q are of no use here: pass cu_seqlens, global and as host integers"
        )
    if getattr(config, "output_attentions", False):
        raise NotImplementedError(f"{layer} asks for {UNSUPPORTED['output_attentions']}")
    if getattr(config, "attention_chunk_size", None) is not None:
        raise NotImplementedError(f"{layer} asks for chunked attention, which WallFacer lacks")
    if getattr(module, "is_cross_attention", False):
        raise NotImplementedError(f"{layer} asks for cross attention, which WallFacer lacks here")
    if query.shape[2] != key.shape[2] and getattr(module, IN_STACK, None) != "cross":
        raise NotImplementedError(
            f"{layer} has {query.shape[2]} queries and {key.shape[2]} keys on this rank: a KV "
            f"cache is not supported; {ON_ONE_PROCESS}"
        )


def _is_causal(module: nn.Module, asked: bool | None) -> bool:
    causal = getattr(module, "is_causal", True) if asked is None else asked
    if not isinstance(causal, bool):
        raise ValueError(f"{type(module).__name__}.is_causal must be True or False, got {causal!r}")
    return causal


def _window(
    module: nn.Module, asked: Window | Literal["own"], causal: bool
) -> tuple[int, int] | None:
    """(left, right) tokens beside a row's own."""
    window: Window = getattr(module, "sliding_window", None) if asked == "own" else asked
    if isinstance(window, tuple):
        return window
    if window is not None and type(module).__name__ in BOTH_SIDES:
        return window - 1, window - 1
    if window is not None and not causal:
        raise NotImplementedError(
            f"{type(module).__name__} asks for a sliding window of {window} without causal "
            "attention, which models define in different ways; WallFacer does not guess"
        )
    return None if window is None else (window - 1, -1)


def _refuse_window(module: nn.Module, window: tuple[int, int] | None) -> None:
    if window is not None:
        raise NotImplementedError(
            f"{type(module).__name__} has a sliding window {window}, and slices of a mask say all "
            "that is seen: they hold for every layer, so take a model without windows"
        )


def _built_window(module: nn.Module, window: tuple[int, int] | None) -> tuple[int, int] | None:
    """The window of masks that the model builds: its config's, whatever the layer's is."""
    built = getattr(getattr(module, "config", None), "sliding_window", None)
    return window or (None if built is None else (built - 1, -1))


def _scale(module: nn.Module, asked: float | None, head_dim: int) -> float:
    """The factor of the scores; GPT-2 of transformers 4 leaves it to attributes of the layer."""
    if asked is not None:
        return asked
    scale = head_dim**-0.5 if getattr(module, "scale_attn_weights", True) else 1.0
    if getattr(module, "scale_attn_by_inverse_layer_idx", False):
        scale /= float(getattr(module, "layer_idx", 0) + 1)
    return scale
