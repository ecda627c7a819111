"""What a user calls: `attach` for any model, `apply` for one that was built with our name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from wf_backends import SequenceParallel
from wf_backends.dsp import RECEIVER, receivers
from wf_transformers.attach import (
    attach_pretrained,
    attends_alone,
    can_ask,
    prepare,
)
from wf_transformers.attention import Attention
from wf_transformers.checkpoints import CHECKPOINTING
from wf_transformers.comparison.verify import VERIFY, Mode
from wf_transformers.families.mixing import refuse_mixing
from wf_transformers.families.table import unasking
from wf_transformers.handle import Handle
from wf_transformers.models import outermost, refuse_virtual_tokens
from wf_transformers.registry import registered_for
from wf_transformers.words import LATENTS, ModelWords, attach_compared


def attach(
    model: nn.Module,
    sp: SequenceParallel,
    activation_checkpointing: Mapping[str, Any] | None = None,
    verify: Mode = True,
    latents: bool = False,
) -> Handle:
    """Let `model` attend over the ranks of `sp`.

    Every outermost Hugging Face model in `model`, itself included, is switched to a free name that
    is registered for `sp`, and prepared as `apply` does. Every module with a method
    `set_sequence_parallel(sp)` has it called.

    Args:
        activation_checkpointing: {"offload": true} keeps of each layer its input alone, in the
            host's memory; with false on the device. None: the model stays as it is.
        verify: whether the model on the ranks is first compared with the model alone, on a short
            drawn batch; "strict": a model that cannot be compared is refused. See `verify`.
        latents: whether layers of multi-head latent attention (DeepSeek-V3's) send their latents in
            place of keys and values; see `SequenceParallel.attention`, kv_up.

    Raises:
        ValueError: if nothing in the model can attend over ranks, and there are several; for a
            wrong word; for latents of a model without such layers.
        NotImplementedError: for a Hugging Face model that cannot be spread over several, one that
            gives something else there than alone, or a model whose layers cannot be checkpointed.
    """
    words: dict[str, Any] = {VERIFY: verify, LATENTS: latents}
    if activation_checkpointing is not None:
        words[CHECKPOINTING] = activation_checkpointing
    _, read = ModelWords.split(words)
    return attach_compared(read, model, sp, partial(attach_model, model, sp))[0]


def attach_model(model: nn.Module, sp: SequenceParallel) -> Handle:
    """`attach`, as it is and without a comparison: what the doors of engines call."""
    models, attending = outermost(model), receivers(model)
    refuse_virtual_tokens(model)
    if sp.size > 1:
        _refuse_alone(model, models, attending)
        refuse_mixing(model)
    for receiver in attending:
        getattr(receiver, RECEIVER)(sp)
    return attach_pretrained(models, sp) if models else Handle(sp)


def _refuse_alone(
    model: nn.Module, models: list[PreTrainedModel], attending: list[nn.Module]
) -> None:
    """Refuse a model of which a part would attend to its own tokens only."""
    if not models and not attending:
        raise ValueError(
            f"nothing in {type(model).__name__} attends over ranks: it holds no Hugging Face "
            f"model and no module with a method {RECEIVER}(sp) to give the SequenceParallel to"
        )
    for one in models:
        if not can_ask(one):
            raise NotImplementedError(attends_alone(one))


connect = connect_any = attach
"""Earlier names of `attach`."""


def apply(model: PreTrainedModel, sp: SequenceParallel) -> Handle:
    """Make `model(..., cu_seqlens=...)` reach every attention layer of this model instance.

    Has the attention modules that ask no registry (`wf_transformers/families/table.py`) call ours
    (parameters and state dict stay), and for a ViT shards the embedded patches
    and brings the rows together again before the last norm, on every rank.

    Args:
        model: built with `attn_implementation=` a name registered for `sp` (where
            its modules ask no registry: any).
        sp: the sequence parallelism of this process.

    Raises:
        ValueError: if nothing in the model uses WallFacer, or it uses another `sp`.
        NotImplementedError: for a BERT decoder, or relative position embeddings; on several ranks
            also for a model whose tokens cannot be spread (see `refuse_unspreadable`).
    """
    attention = registered_for(model)
    if attention is None and not unasking(model):
        raise ValueError(
            f"{type(model).__name__} uses attn_implementation="
            f"{model.config._attn_implementation!r}; call wf_transformers.register(sp) and build "
            "the model with the registered name"
        )
    if attention is not None and attention.sp is not sp:
        raise ValueError("the model's attn_implementation was registered for another sp")
    handle = Handle(sp, attention or Attention(sp))
    with handle.removed_on_error():
        prepare(model, handle)
    return handle
