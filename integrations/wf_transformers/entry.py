"""What a user calls: `attach` for any model, `apply` for one that was built with our name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from wf_backends import SequenceParallel
from wf_backends._validation import of_type
from wf_backends.dsp import RECEIVER, receivers
from wf_transformers.attach import attach_pretrained, prepare, refuse_local_attention
from wf_transformers.attention.function import Attention
from wf_transformers.attention.registry import registered_for
from wf_transformers.comparison.verify import VERIFY, Mode
from wf_transformers.families.mixing import refuse_mixing
from wf_transformers.families.table import modules_without_registry
from wf_transformers.handle import Handle
from wf_transformers.memory.checkpoints import CHECKPOINTING
from wf_transformers.models import outermost, refuse_adapters
from wf_transformers.options import LATENTS, ModelOptions, attach_compared

SP = "a SequenceParallel, as SequenceParallel(SequenceParallelConfig.from_dict({...})) makes it"


def attach(
    model: nn.Module,
    sp: SequenceParallel,
    activation_checkpointing: Mapping[str, Any] | None = None,
    verify: Mode = True,
    latents: bool = False,
) -> Handle:
    """Let `model` attend over the ranks of `sp`.

    Every outermost Hugging Face model in `model` (or `model` itself) gets an attention
    implementation with an unused name, registered for `sp`, and is prepared as by `apply`. The
    method `set_sequence_parallel(sp)` is called on every module that has it.

    Args:
        activation_checkpointing: None leaves the model as it is. {"offload": true} keeps only the
            input of each layer, in host memory; {"offload": false} keeps it on the device.
        verify: whether to compare the model on these ranks with the model on one rank first, on a
            short random batch. "strict" refuses a model that cannot be compared. See `verify`.
        latents: whether layers of multi-head latent attention (DeepSeek-V3's) send their latents
            instead of keys and values; see `SequenceParallel.attention`, kv_up.

    Raises:
        ValueError: if there are several ranks and nothing in the model can attend over them; for a
            wrong option; for `latents` of a model without such layers.
        NotImplementedError: for a Hugging Face model that cannot run on several ranks or computes
            something else there than on one, or a model whose layers cannot be checkpointed.
    """
    of_type("sp", sp, SequenceParallel, SP)
    block: dict[str, Any] = {VERIFY: verify, LATENTS: latents}
    if activation_checkpointing is not None:
        block[CHECKPOINTING] = activation_checkpointing
    _, options = ModelOptions.split(block)
    return attach_compared(options, model, sp, partial(attach_model, model, sp))


def attach_model(model: nn.Module, sp: SequenceParallel) -> Handle:
    """Attach `model` without options and without a comparison, as the entries of engines do."""
    models, modules_with_receiver = outermost(model), receivers(model)
    refuse_adapters(model)
    if sp.size > 1:
        refuse_mixing(model)
        for pretrained in models:
            refuse_local_attention(pretrained)
        if not models and not modules_with_receiver:
            raise ValueError(
                f"nothing in {type(model).__name__} attends over ranks: it holds no model of "
                "transformers (for one of diffusers call wf_diffusers.attach instead) and no "
                f"module with a method {RECEIVER}(sp) to give the SequenceParallel to"
            )
    for module in modules_with_receiver:
        getattr(module, RECEIVER)(sp)
    return attach_pretrained(model, sp) if models else Handle(sp)


connect = attach
"""An earlier name of `attach`."""


def apply(model: PreTrainedModel, sp: SequenceParallel) -> Handle:
    """Make `model(..., cu_seqlens=...)` reach every attention layer of this model instance.

    Attention modules that do not use transformers' registry call our attention from then on
    (`wf_transformers/families/table.py`); parameters and state dict stay as they are. The embedded
    patches of a ViT are sharded, and gathered on every rank before the last norm.

    Args:
        model: built with an `attn_implementation=` that is registered for `sp`; any name if its
            modules do not use the registry.
        sp: the sequence parallelism of this process.

    Raises:
        ValueError: if nothing in the model uses WallFacer, or it uses another `sp`.
        NotImplementedError: for a BERT decoder, or relative position embeddings; on several ranks
            also for a model whose tokens cannot be spread (see `refuse_unspreadable`).
    """
    attention = registered_for(model)
    if attention is None and not modules_without_registry(model):
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
