"""Prepare one model instance: what registering a name alone does not reach. All can be undone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import transformers
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.modeling_utils import PreTrainedModel
from transformers.models.bert import modeling_bert
from transformers.models.vit.modeling_vit import ViTModel

from wf_backends import SequenceParallel
from wf_backends.dsp import receivers
from wf_backends.schedule import padding_multiple
from wf_transformers.attention import UNSUPPORTED, Attention
from wf_transformers.bert import BertSelfAttention
from wf_transformers.calls import has_tokens, parameter_names, refuse_call, takes_any_keyword
from wf_transformers.models import refuse_unspreadable
from wf_transformers.registry import Removable, registered_for


class Application(Removable):
    """What was done to one model."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention

    @property
    def checkpoint_kwargs(self) -> dict[str, Any]:
        """For `model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=...)`.

        Needed with documents (padding of full attention among them) in models that do not pass
        keyword arguments down; harmless in others.
        """
        context_fn = self.attention.documents.checkpoint_contexts
        return {"use_reentrant": False, "context_fn": context_fn}


def apply(model: PreTrainedModel, sp: SequenceParallel) -> Application:
    """Make `model(..., cu_seqlens=...)` reach every attention layer of this model instance.

    Replaces the self-attention modules of a BERT of transformers 4 that was built with another name
    (parameters and state dict stay the same), and for a ViT shards the embedded patches and
    brings the rows together again before the last norm, on every rank.

    Args:
        model: built with `attn_implementation=` a name registered for `sp` (a BERT of
            transformers 4: or "eager").
        sp: the sequence parallelism of this process.

    Raises:
        ValueError: if nothing in the model uses WallFacer, or it uses another `sp`.
        NotImplementedError: for a BERT decoder, or relative position embeddings; on several ranks
            also for a model whose tokens cannot be spread (see `refuse_unspreadable`).
    """
    if sp.size > 1:
        refuse_unspreadable(model)
    old = list(unhooked_bert(model))
    attention = registered_for(model)
    if attention is None and not old:
        raise ValueError(
            f"{type(model).__name__} uses attn_implementation="
            f"{model.config._attn_implementation!r}; call wf_transformers.register(sp) and build "
            "the model with the registered name"
        )
    if attention is not None and attention.sp is not sp:
        raise ValueError("the model's attn_implementation was registered for another sp")
    application = Application(attention or Attention(sp))
    for parent, name, module in old:
        setattr(parent, name, BertSelfAttention(module, application.attention))
        application.undo.callback(setattr, parent, name, module)
    _take_over_bert(model, application)
    _tell_documents(model, application)
    vit = model.base_model
    if isinstance(vit, ViTModel):
        shard_between(application, vit.embeddings, vit.layernorm)
    return application


def _take_over_bert(model: nn.Module, application: Application) -> None:
    """Of a BERT that was connected before: its modules of ours hold what they call."""
    for module in model.modules():
        if isinstance(module, BertSelfAttention) and module.attention is not application.attention:
            application.undo.callback(setattr, module, "attention", module.attention)
            module.attention = application.attention


def shard_between(application: Application, first: nn.Module, last: nn.Module) -> None:
    """Shard what `first` returns, and give `last` the rows of all ranks: for encoders like ViT.

    What runs in between sees this rank's rows (b, s, width) of (b, S, width), padded to equal
    shards; the padding is a document of its own and gone again before `last`. Everything else
    is computed on every rank alike, so that all ranks have the same loss. Gradients of all
    parameters are then to be averaged over the ranks, as data parallelism does.

    Args:
        application: what `apply` gave for the model; its `remove()` takes this back too.
        first, last: modules of the model; `first` returns the rows, `last` takes them as its
            first argument.
    """
    sp, documents = application.attention.sp, application.attention.documents
    multiple = padding_multiple(sp.config.layout, sp.size)
    lengths: list[int] = []

    def shard(_: nn.Module, __: Any, full: Tensor) -> Tensor:
        lengths[:] = [full.shape[1]]
        padding = -full.shape[1] % multiple
        if padding:
            documents.replace((0, full.shape[1], full.shape[1] + padding))
        scale_gradient(full, 1 / sp.size)
        return sp.shard(pad(full, (0, 0, 0, padding)), dim=1)

    def unshard(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        full = sp.unshard(args[0], dim=1)
        scale_gradient(full, sp.size)
        return (full[:, : lengths[0]], *args[1:])

    application.undo.callback(first.register_forward_hook(shard).remove)
    application.undo.callback(last.register_forward_pre_hook(unshard).remove)


def scale_gradient(x: Tensor, factor: float) -> None:
    """In between, a rank's gradients are its share of a sum; outside they are the whole."""
    if x.requires_grad:
        x.register_hook(lambda grad: grad * factor)


def _tell_documents(model: PreTrainedModel, application: Application) -> None:
    """Open a scope of the call's documents around every forward of the model, and check it."""
    attention = application.attention
    documents, several = attention.documents, attention.sp.size > 1
    names, passes_on = parameter_names(model), takes_any_keyword(model)

    def enter(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        documents.push(kwargs.get("cu_seqlens"))  # before any error: `leave` is called always
        attention.asked = False
        given = dict(zip(names, args, strict=False)) | kwargs
        if given.get("output_attentions"):
            raise NotImplementedError(f"{UNSUPPORTED['output_attentions']}, which WallFacer lacks")
        if several:
            refuse_call(model, given, names)
        if not passes_on:
            return args, {k: v for k, v in kwargs.items() if k != "cu_seqlens"}
        # Where there were documents before, a layer that is recomputed must know of none
        none = {"cu_seqlens": None} if documents.used and has_tokens(given) else {}
        return args, none | kwargs

    def leave(*_: Any) -> None:
        documents.pop()

    undo = application.undo
    if not receivers(model):
        check_asked(model, application, attends_alone(model))
    undo.callback(model.register_forward_pre_hook(enter, with_kwargs=True).remove)
    undo.callback(model.register_forward_hook(leave, always_call=True).remove)
    attention.applied.add(model)
    undo.callback(attention.applied.discard, model)


def check_asked(model: nn.Module, application: Application, problem: str) -> None:
    """Refuse, after its first forward, a model of several ranks whose layers never called us.

    What calls the model sets `application.attention.asked` to False before.
    """
    attention = application.attention

    def check(*_: Any) -> None:
        if not attention.asked and registered_for(model) in (None, attention):
            raise NotImplementedError(problem)  # else the model was connected once more

    if attention.sp.size > 1:
        application.undo.callback(model.register_forward_hook(check).remove)


def attends_alone(model: nn.Module) -> str:
    """What is wrong with a model whose attention is its own."""
    return (
        f"no layer of {type(model).__name__} (transformers {transformers.__version__}) asks "
        "transformers' attention registry: every rank would attend to its own tokens only. Take a "
        "model whose attention does, or a transformers in which this one's does"
    )


def is_applied(model: nn.Module) -> bool:
    """Whether `apply` was called on this very module."""
    mine = [m.attention for m in model.modules() if isinstance(m, BertSelfAttention)]
    named = registered_for(model)
    return any(attention is not None and model in attention.applied for attention in [*mine, named])


def unhooked_bert(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """(parent, name, module) of every BERT self attention that asks no registry."""
    if hasattr(modeling_bert, "ALL_ATTENTION_FUNCTIONS"):
        return
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, modeling_bert.BertSelfAttention):
                yield parent, name, child
