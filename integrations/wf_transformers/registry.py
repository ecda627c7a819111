"""WallFacer under a name of transformers' own attention registry; nothing is overwritten."""

from __future__ import annotations

from functools import partial
from threading import Lock
from typing import Any

import transformers
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert import modeling_bert

from wf_backends import SequenceParallel
from wf_transformers.attention import Attention
from wf_transformers.families.table import TABLE, changes
from wf_transformers.handle import Handle

# BERT's own registry, of modules: in versions of transformers whose BERT asks no other.
BERTS: dict[str, Any] | None = getattr(modeling_bert, "BERT_SELF_ATTENTION_CLASSES", None)
MASKS: Any = getattr(transformers, "AttentionMaskInterface", None)  # from 4.53 on
_NAMING = Lock()  # ranks that are threads look for a name together: one after the other takes one


def register(sp: SequenceParallel, name: str = "wallfacer") -> Handle:
    """Let models built with `attn_implementation=name` attend over the ranks of `sp`.

    A name of ours may be registered again, for another `sp`: models look it up at every call
    (a BERT of transformers 4 when it is built).

    Args:
        sp: the sequence parallelism that this process takes part in.
        name: what models ask for. Several `sp` in one process take several names.

    Raises:
        ValueError: if the name belongs to somebody else's function, or to transformers itself.
    """
    found = ALL_ATTENTION_FUNCTIONS.get(name)
    ours = found is None and name not in (BERTS or ()) or isinstance(found, Attention)
    if name == "eager" or not ours or not _mask_name_is_free(name):
        raise ValueError(f"attention implementation {name!r} is taken; choose another name")
    attention = Attention(sp, name)
    ALL_ATTENTION_FUNCTIONS[name] = attention
    if BERTS is not None:
        BERTS[name] = partial(_build_bert, attention)
    if MASKS is not None:
        MASKS.register(name, mask_function)
    handle = Handle(sp, attention)
    handle.undo.callback(_unregister, attention)
    return handle


def _unregister(attention: Attention) -> None:
    if ALL_ATTENTION_FUNCTIONS.get(attention.name) is attention:
        del ALL_ATTENTION_FUNCTIONS[attention.name]
        if BERTS is not None:
            del BERTS[attention.name]


def register_free(sp: SequenceParallel) -> Handle:
    """As `register`, by "wallfacer", or with a number if another model of this process has it."""
    with _NAMING:
        name, number = "wallfacer", 1
        while name in ALL_ATTENTION_FUNCTIONS:
            number += 1
            name = f"wallfacer_{number}"
        return register(sp, name)


def _build_bert(
    attention: Attention, config: Any, position_embedding_type: str | None = None
) -> nn.Module:
    """What BertAttention of transformers 4 builds for a name."""
    module = modeling_bert.BertSelfAttention(config, position_embedding_type)
    for name, value in changes(module, TABLE["BertSelfAttention"], attention).items():
        setattr(module, name, value)
    return module


def registered_for(model: Any) -> Attention | None:
    """Our attention function, if it is what the model's config names."""
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    found = ALL_ATTENTION_FUNCTIONS.get(name)
    return found if isinstance(found, Attention) else None


def _mask_name_is_free(name: str) -> bool:
    return MASKS is None or MASKS().get(name, mask_function) is mask_function


def mask_function(
    *, attention_mask: Tensor | None = None, use_vmap: bool = False, **_: Any
) -> Tensor | None:
    """In place of a mask of (s, s) elements, hand on what the user gave, to be checked.

    Without it, transformers would drop the user's mask for a name that it does not know.
    """
    if use_vmap:
        raise NotImplementedError(
            "this model adds mask functions of its own (or_mask_function, and_mask_function), "
            "which WallFacer cannot honour"
        )
    return attention_mask
