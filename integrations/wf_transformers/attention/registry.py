"""Registers WallFacer in transformers' attention registry; nothing there is overwritten."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any

import transformers
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert import modeling_bert

from wf_backends import SequenceParallel
from wf_transformers.attention.function import Attention
from wf_transformers.families.table import TABLE, attribute_changes
from wf_transformers.handle import Handle

# BERT's own registry of modules, in versions of transformers whose BERT uses no other.
BERT_CLASSES: dict[str, Any] | None = getattr(modeling_bert, "BERT_SELF_ATTENTION_CLASSES", None)
MASK_INTERFACE: Any = getattr(transformers, "AttentionMaskInterface", None)  # from 4.53 on
_NAMING = Lock()  # several ranks may be threads of one process, and each takes a name of its own


def register(sp: SequenceParallel, name: str = "wallfacer") -> Handle:
    """Let models built with `attn_implementation=name` attend over the ranks of `sp`.

    A name that WallFacer has registered may be registered again for another `sp`: models look it up
    at every call (a BERT of transformers 4 when it is built).

    Args:
        sp: the sequence parallelism of this process.
        name: for `attn_implementation`. Several `sp` in one process need different names.

    Raises:
        ValueError: if the name belongs to transformers or to another library.
    """
    registered = ALL_ATTENTION_FUNCTIONS.get(name)
    is_unused = registered is None and name not in (BERT_CLASSES or ())
    is_available = name != "eager" and (is_unused or isinstance(registered, Attention))
    mask = mask_function if MASK_INTERFACE is None else MASK_INTERFACE().get(name, mask_function)
    if not is_available or mask is not mask_function:
        raise ValueError(f"attention implementation {name!r} is taken; choose another name")
    attention = Attention(sp, name)
    ALL_ATTENTION_FUNCTIONS[name] = attention
    if BERT_CLASSES is not None:
        BERT_CLASSES[name] = partial(_build_bert, attention)
    if MASK_INTERFACE is not None:
        MASK_INTERFACE.register(name, mask_function)
    handle = Handle(sp, attention)
    handle.undo.callback(_unregister, attention)
    return handle


def _unregister(attention: Attention) -> None:
    if ALL_ATTENTION_FUNCTIONS.get(attention.name) is attention:
        del ALL_ATTENTION_FUNCTIONS[attention.name]
        if BERT_CLASSES is not None:
            del BERT_CLASSES[attention.name]


def register_free(sp: SequenceParallel) -> Handle:
    """`register` under "wallfacer", or "wallfacer_2" and so on if that name is taken."""
    with _NAMING:
        name, number = "wallfacer", 1
        while name in ALL_ATTENTION_FUNCTIONS:
            number += 1
            name = f"wallfacer_{number}"
        return register(sp, name)


def _build_bert(attention: Attention, *args: Any, **kwargs: Any) -> nn.Module:
    """Build the self-attention of a BERT of transformers 4, which calls `attention`."""
    module = modeling_bert.BertSelfAttention(*args, **kwargs)
    for name, value in attribute_changes(module, TABLE["BertSelfAttention"], attention).items():
        setattr(module, name, value)
    return module


def registered_for(model: Any) -> Attention | None:
    """Our attention function, if the model's config names one."""
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    registered = ALL_ATTENTION_FUNCTIONS.get(name)
    return registered if isinstance(registered, Attention) else None


def mask_function(
    *,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    mask_function: Callable[..., Any] | None = None,
    **_: Any,
) -> Tensor | None:
    """Return the user's mask, for `MaskCheck`, instead of building one of (s, s) elements.

    Without this function transformers would drop the user's mask under a name that it does not
    know. Refused are masks that show a row more than its own rule: PaliGemma's prefix, for one.
    """
    shows_more = getattr(mask_function, "__qualname__", "").startswith("or_masks.")
    if use_vmap or shows_more:
        raise NotImplementedError(
            "this model adds mask functions of its own (or_mask_function, and_mask_function, "
            "block_sequence_ids, as from token_type_ids of an image or a prefix), which WallFacer "
            "cannot honour"
        )
    return attention_mask
