"""The function that a transformers model calls in place of its own attention."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType, MappingProxyType
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from wf_backends import SequenceParallel
from wf_backends._compile import eager
from wf_backends.comm import ConsistencyCheck, Shared
from wf_backends.schedule import SLICE_ARGUMENTS
from wf_transformers.attention.blocks import BLOCKS, masks_with_blocks
from wf_transformers.attention.chosen import MASK_IS_CHOICE, RATIO, ChosenAttention, take_choice
from wf_transformers.attention.documents import Documents, by_sample
from wf_transformers.attention.llama4 import chunk_borders, scaled_by_position
from wf_transformers.attention.masks import MaskCheck, padding_of
from wf_transformers.calls import IN_STACK, refuse_layer
from wf_transformers.models import refuse_varying_rope

SCORE_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "softcap": "softcap",  # scores are softcap tanh(scores / softcap)
        "s_aux": "sinks",  # (h,) of the heads
        "alibi_slopes": "alibi_slopes",  # (h,) by which scores fall with the distance
        "position_bias": "position_bias",  # (h, 2 n - 1) by the distance of key and query
        "kv_up": "kv_up",  # key and value are latents (b, 1, s, ...)
        "indices": "chosen",  # (b, s, g or 1, t), the keys that each row sees
        "block_indices": "chosen",
        "entries": "entries",  # (b, T, d), beside the keys of a window; "indices" are of them
        RATIO: "ratio",  # how many tokens an entry stands for, where a row sees all entries
    }
)
"""Keyword arguments of layers about their scores -> parameters of `SequenceParallel.attention`, of
`SparseAttention` or of `CompressedAttention`."""

Window = int | tuple[int, int] | None
TWO_SIDED = ("ModernBertAttention",)
"""Layers of transformers 5 in which a window w shows w - 1 tokens on each side of a row."""


class Attention(Shared):
    """sp.attention behind transformers' attention interface, for all layers of all its models.

    Shapes: b batch, s rows of this rank, h heads, g key heads, d head_dim.
    """

    def __init__(self, sp: SequenceParallel, name: str = "") -> None:
        self.sp = sp
        self.name = name
        """In transformers' registry; "" if it is not registered."""
        self.documents = Documents()
        self.cut_by_heads: WeakSet[nn.Module] = WeakSet()
        """Models that take whole batches and whose inner model gets this rank's part (heads.py)."""
        self.was_called = False
        """Whether a layer has called since this was last set to False."""
        self.logits_are_whole = False
        """Whether labels and logits of the running call are those of all ranks (custom_loss.py)."""
        self.cache: Any = None
        """The `ShardedCache` while a model generates (generation/)."""
        self.drops = True
        """Whether dropout is applied where a layer wants it."""
        self.check_mask = MaskCheck()
        self._consistency = ConsistencyCheck(sp.comm)
        self.chosen = ChosenAttention(sp)
        self._layer_names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()

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
            dropout: probability for the attention weights, with a new random mask in each call.
            scaling: factor of the scores. None: the layer's own rule.
            sliding_window: how many keys a row sees with its own, or (left, right) of its own.
                None: all. "own": the layer's attribute `sliding_window`, if it has one.
            kwargs: those of `SCORE_OPTIONS`; `cu_seqlens`, the borders of packed documents, or the
                slices of a mask, as host integers, global. What changes nothing is ignored.

        Returns:
            out (b, s, h, d), and None in place of the attention weights.

        Raises:
            NotImplementedError: for arguments in `UNSUPPORTED`, and for rows that were not cut.
            ValueError: for a mask other than that of causal or full attention, with the window or
                without.
        """
        self.was_called = True
        if not torch.compiler.is_compiling() and _wants_weights(module, sys._getframe(1)):
            kwargs["output_attentions"] = True
        if kwargs.get(MASK_IS_CHOICE):
            key, value = take_choice(query, key, value, attention_mask, kwargs)
            attention_mask = None
        with self.refusing_on_all_ranks():
            self._check(module, query, key, kwargs)
            # GPT-2 of transformers 4 passes is_causal=False in causal layers for one row or a mask.
            unreliable = attention_mask is not None or query.shape[2] == 1
            causal = _is_causal(module, is_causal if is_causal or not unreliable else None)
            window = _window(module, sliding_window, causal)
            query = scaled_by_position(self, module, query, kwargs)
            q, k, v = (as_autocast(x).transpose(1, 2) for x in (query, key, value))
            options: dict[str, Any] = {
                ours: kwargs[theirs]
                for theirs, ours in SCORE_OPTIONS.items()
                if kwargs.get(theirs) is not None
            }
            options |= self._mask_kwargs(module, attention_mask, causal, window, kwargs)
            options |= chunk_borders(self, module, q.shape[1], options)
            options["softmax_scale"] = _scale(module, scaling, query.shape[-1])
        dropout_p = dropout if self.drops else 0.0
        return self._attend(module, q, k, v, **options, dropout_p=dropout_p), None

    def refusing_on_all_ranks(self) -> AbstractContextManager[None]:
        """A block whose errors are raised on all ranks, except while torch.compile traces it."""
        return nullcontext() if torch.compiler.is_compiling() else self._consistency

    def _check(
        self, module: nn.Module, query: Tensor, key: Tensor, kwargs: Mapping[str, Any]
    ) -> None:
        """Refuse arguments that WallFacer does not support, and rows that were not cut."""
        refuse_layer(module, query, key, kwargs)
        if self.sp.size > 1:
            refuse_varying_rope(module)
            self.documents.check_rows(type(module).__name__, query.shape[2])

    def _mask_kwargs(
        self,
        module: nn.Module,
        mask: Tensor | None,
        causal: bool,
        window: tuple[int, int] | None,
        kwargs: dict[str, Any],
    ) -> dict[str, Any]:
        """The arguments of sp.attention that describe the mask."""
        running = self.documents.running
        seqlen = running.seqlen if running else None
        stack_role = getattr(module, IN_STACK, None)
        if stack_role is None:
            self.check_mask(mask, causal, _mask_window(module, window))
            documents = self.documents.current(kwargs)
            if SLICE_ARGUMENTS[0] in documents and window is not None:
                raise NotImplementedError(
                    f"{type(module).__name__} has a sliding window {window}, and slices of a mask "
                    "say all that is seen: they hold for every layer, so take a model without "
                    "windows"
                )
            if SLICE_ARGUMENTS[0] in documents:
                return {**documents}
            borders = by_sample(documents)
            if BLOCKS in documents:
                causal, borders = True, {"masks": masks_with_blocks(documents, window)}
            window = window or (-1, -1)
            return {"causal": causal, "window_size": window, "seqlen": seqlen, **borders}
        causal = causal and stack_role != "cross"
        masks = padding_of(mask, causal, seqlen)
        return {"seqlen": seqlen} | ({"causal": causal} if masks is None else {"masks": masks})

    @eager
    def _attend(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        masks: Sequence[Mapping[str, Any]] | None = None,
        chosen: Tensor | None = None,
        entries: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """sp.attention with the layer's name, which compiled graphs must not depend on.

        Args:
            q: (b, s, h, d). k, v: (b, s, g, d).
            masks: of each sample, if they differ: arguments of sp.attention, which then runs
                sample by sample, because all samples of a call have the same mask.
        """
        name = self._layer_names.get(module)
        if name is None:
            name = f"{type(module).__name__} {getattr(module, 'layer_idx', '')}"
        if chosen is not None or entries is not None:
            return self.chosen(q, k, v, chosen, name, entries=entries, **options)
        if self.cache is not None and self.cache.length:
            return self.cache.attention(module, q, k, v, **options)
        if self.cache is not None:
            self.cache.keep(module, k, v, **options)
        if masks is None:
            return self.sp.attention(q, k, v, **options, name=name)
        samples = zip(*(x.split(1) for x in (q, k, v)), masks, strict=True)
        out = [self.sp.attention(*qkv, **{**options, **mask}, name=name) for *qkv, mask in samples]
        return torch.cat(out)

    def record_layer_names(self, model: nn.Module) -> None:
        """Keep the qualified name of every module of a model, for reports and errors."""
        self._layer_names.update((module, name) for name, module in model.named_modules())


def as_autocast(x: Tensor) -> Tensor:
    """`x` in the dtype that torch's attention gets under torch.autocast; float64 stays as it is."""
    device = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


def _wants_weights(module: nn.Module, caller: FrameType) -> bool:
    """Whether `output_attentions` was set in the calling layer, although it does not pass it on.

    In transformers 4 (GPT-2, GPT-NeoX) the arguments of the layer's forward show it, in 5 the
    object that collects a model's outputs.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    if collector is not None and "attentions" in (collector.get() or ()):
        return True
    code = caller.f_code
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if "output_attentions" not in arguments:
        return False
    variables = caller.f_locals
    return variables.get("self") is module and bool(variables["output_attentions"])


def _is_causal(module: nn.Module, requested: bool | None) -> bool:
    causal = getattr(module, "is_causal", True) if requested is None else requested
    if not isinstance(causal, bool):
        raise ValueError(f"{type(module).__name__}.is_causal must be True or False, got {causal!r}")
    return causal


def _window(
    module: nn.Module, requested: Window | Literal["own"], causal: bool
) -> tuple[int, int] | None:
    """(left, right): how many keys a row sees before and after its own; -1 = all."""
    window: Window = getattr(module, "sliding_window", None) if requested == "own" else requested
    if isinstance(window, tuple):
        return window
    if window is not None and any(c.__name__ in TWO_SIDED for c in type(module).__mro__):
        return window - 1, window - 1
    if window is not None and not causal:
        raise NotImplementedError(
            f"{type(module).__name__} asks for a sliding window of {window} without causal "
            "attention, which models define in different ways; WallFacer does not guess"
        )
    return None if window is None else (window - 1, -1)


def _mask_window(module: nn.Module, window: tuple[int, int] | None) -> tuple[int, int] | None:
    """The window of the mask that the model may have built: the layer's, else its config's."""
    config_window = getattr(getattr(module, "config", None), "sliding_window", None)
    return window or (None if config_window is None else (config_window - 1, -1))


def _scale(module: nn.Module, requested: float | None, head_dim: int) -> float:
    """The factor of the scores. GPT-2 of transformers 4 says it by attributes of the layer."""
    if requested is not None:
        return requested
    scale = head_dim**-0.5 if getattr(module, "scale_attn_weights", True) else 1.0
    if getattr(module, "scale_attn_by_inverse_layer_idx", False):
        scale /= float(getattr(module, "layer_idx", 0) + 1)
    return scale
