"""How one model instance is attached. Every step goes into `handle.undo`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import transformers
from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.models.vit.modeling_vit import ViTModel

from wf_backends import SequenceParallel
from wf_backends._compile import eager
from wf_backends.dsp import DynamicSequenceParallel, Mode, Stages, receivers, spread
from wf_transformers.attention import UNSUPPORTED
from wf_transformers.calls import (
    TOKENS,
    by_name,
    parameter_names,
    refuse_call,
    refuse_inner_call,
    refuse_media,
    takes_any_keyword,
    tokens_of,
)
from wf_transformers.documents import MASK_WORDS, mask_words
from wf_transformers.draws import RankDraws
from wf_transformers.families.experts import RouterLoss, has_router_loss
from wf_transformers.families.media import language_model, media_of, take_media
from wf_transformers.families.mixing import has_mixers, refuse_unspreadable, spread_mixers
from wf_transformers.families.stacks import cut_stacks, shard_between, stacks_of
from wf_transformers.families.table import LATENTS, REFUSED, changes_in, unasking
from wf_transformers.handle import Handle
from wf_transformers.models import (
    asks_registry,
    inner_models,
    row_of,
    tell_windows,
)
from wf_transformers.positions import tell_positions
from wf_transformers.registry import register_free, registered_for
from wf_transformers.tensor_parallel import check_tensor_parallel

Words = dict[str, Any]

APPLIED = "wallfacer_applied"
"""Of models that tell their Attention their documents, whatever they pass down."""


def attach_pretrained(models: Sequence[Any], sp: SequenceParallel) -> Handle:
    """Switch Hugging Face models to a free name that is registered for `sp`, and prepare them.

    One name for all, because models may share a config, which is where their name stands.

    Raises:
        NotImplementedError: on several ranks, for a model whose tokens cannot be spread.
    """
    handle = register_free(sp)
    with handle.removed_on_error():
        for model in models:
            take_media(model, handle)
            _set_name(language_model(model), handle)
            prepare(language_model(model), handle)
    return handle


def attach_stages(
    model: nn.Module, sp: SequenceParallel, stages: Stages, verify: Mode = True
) -> Handle:
    """Switch the hidden state of `model` over the ranks of `sp` between its stages (DSP).

    Args:
        verify: whether the first forward is run on one rank too and compared; True, False or
            "strict".

    Raises:
        ValueError: if the stages do not fit the model.
    """
    handle = Handle(sp)
    dsp = DynamicSequenceParallel(sp.comm, gradients="averaged")
    handle.undo.callback(spread(model, sp, dsp, stages, verify).remove)
    return handle


def _set_name(model: Any, handle: Handle) -> None:
    undo, name = handle.undo, handle.name
    if hasattr(model, "set_attn_implementation"):  # transformers 5
        undo.callback(model.set_attn_implementation, model.config._attn_implementation)
        model.set_attn_implementation(name)
        return
    # GPT-2 of transformers 4 keeps a copy of its config's choice
    copies = (module for module in model.modules() if "_attn_implementation" in vars(module))
    for holder in (model.config, *copies):
        undo.callback(setattr, holder, "_attn_implementation", holder._attn_implementation)
        holder._attn_implementation = name


def prepare(model: PreTrainedModel, handle: Handle) -> None:
    """What registering a name alone does not reach: modules that ask no registry, documents, a
    ViT's patches.

    Raises:
        NotImplementedError: as `apply`.
    """
    spread_mixers(model, handle)
    if handle.sp.size > 1:
        refuse_unspreadable(model)
        check_tensor_parallel(model, handle)
    tell_windows(model)
    handle.attention.name_layers(model)
    for module, changes in changes_in(model, handle.attention):
        for name, value in changes.items():
            handle.set(module, name, value)
    cut_stacks(model, handle)
    if handle.sp.size > 1 and not stacks_of(model):
        _draw_by_rank(model, handle)
        tell_positions(model, handle)
        if has_router_loss(model):
            RouterLoss(model, handle)
    _tell_documents(model, handle)
    vit = model.base_model
    if isinstance(vit, ViTModel):
        shard_between(handle, vit.embeddings, vit.layernorm)


def _draw_by_rank(model: nn.Module, handle: Handle) -> None:
    """Around forwards of tokens in training: dropout falls on other elements on every rank."""
    draws, names = RankDraws(handle.sp.rank), parameter_names(model)

    @eager
    def enter(called: nn.Module, args: tuple[Any, ...], kwargs: Words) -> None:
        tokens = tokens_of(by_name(names, args, kwargs))
        if tokens is not None and model not in handle.attention.cut_by_heads:
            draws.enter_for(called, handle.sp, tokens.device)

    handle.hooks(
        model.register_forward_pre_hook(enter, with_kwargs=True),
        model.register_forward_hook(eager(draws.leave), always_call=True),
    )


def take_latents(model: nn.Module, handle: Handle) -> None:
    """Have an attached model's layers of multi-head latent attention send their latents.

    Raises:
        ValueError: for a model without such layers, or whose attention is not over the ranks.
    """
    layers = [(m, forward) for m in model.modules() if (forward := row_of(LATENTS, m))]
    if not layers:
        raise ValueError(
            f'"latents": true is for models with {" or ".join(LATENTS)} of transformers, and '
            f"{type(model).__name__} has none: leave it out"
        )
    if not handle.attention.name:
        raise ValueError('"latents": true is for attention over the ranks, and not beside "dsp"')
    for module, forward in layers:
        handle.set(module, "wallfacer", handle.attention)
        handle.set(module, "forward", MethodType(forward, module))


def _tell_documents(model: PreTrainedModel, handle: Handle) -> None:
    """Open a scope of the call's documents around every forward of the model, and check it."""
    attention = handle.attention
    names, passes_on = parameter_names(model), takes_any_keyword(model)
    stacks = bool(stacks_of(model))

    def check(args: tuple[Any, ...], kwargs: Words) -> Words:
        given = by_name(names, args, kwargs)
        if given.get("output_attentions"):
            raise NotImplementedError(f"{UNSUPPORTED['output_attentions']}, which WallFacer lacks")
        if handle.sp.size > 1:
            whole = TOKENS if stacks or model in attention.cut_by_heads else ()
            cut = {key: value for key, value in given.items() if key not in whole}
            refuse_call(model, cut, names, attention.logits_are_whole)
            if media_of(model) is None:
                refuse_media(model, cut)
            tokens = tokens_of(cut)
            attention.documents.expect(0 if tokens is None else tokens.shape[1])
            if tokens is None:
                with handle.advising():
                    handle.sp.check_same(given)
        if not passes_on:
            known = without_documents(args, kwargs)  # without positions where ALiBi has its own
            return {k: x for k, x in known.items() if k != "position_ids" or k in names}
        # Where there were documents before, a layer that is recomputed must know of none
        knows = attention.documents.used and tokens_of(given) is not None
        return ({"cu_seqlens": None} if knows else {}) | kwargs

    problem = None if receivers(model) else attends_alone(model)
    scope_documents(model, handle, check, problem)
    handle.set(model, APPLIED, True)
    if handle.sp.size > 1:
        _check_inner_models(model, handle)


def _check_inner_models(model: PreTrainedModel, handle: Handle) -> None:
    """Check calls of the models inside `model`, which scripts call for hidden states, too."""

    def check(inner: nn.Module, args: tuple[Any, ...], kwargs: Words) -> None:
        given = by_name(parameter_names(inner), args, kwargs)
        running = handle.attention.documents.running
        if running is None or running.rows != 0:  # else attention refuses to be called
            refuse_inner_call(inner, given, handle.attention.logits_are_whole)

    for inner in inner_models(model):
        handle.hooks(inner.register_forward_pre_hook(check, with_kwargs=True))


def without_documents(_: tuple[Any, ...], kwargs: Words) -> Words:
    """A call's keyword arguments for a model that does not know documents and slices."""
    return {key: value for key, value in kwargs.items() if key not in MASK_WORDS}


def scope_documents(
    model: nn.Module,
    handle: Handle,
    change: Callable[[tuple[Any, ...], Words], Words],
    problem: str | None,
) -> None:
    """Open a scope of the call's documents around every forward of the model.

    Args:
        change: (args, kwargs) of a call -> the kwargs that the model gets; may refuse it.
        problem: the `NotImplementedError` after a forward on several ranks in which no layer called
            us. None: layers need not.
    """
    attention = handle.attention

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: Words) -> tuple[Any, Words]:
        attention.documents.push(mask_words(kwargs))  # before any error: `leave` always runs
        attention.asked = False
        return args, change(args, kwargs)

    def check_asked(*_: Any) -> None:
        if not attention.asked and registered_for(model) in (None, attention):
            raise NotImplementedError(problem)  # else the model was attached once more

    def leave(*_: Any) -> None:
        attention.documents.pop()

    if problem is not None and handle.sp.size > 1:
        handle.hooks(model.register_forward_hook(check_asked))
    handle.hooks(
        model.register_forward_pre_hook(enter, with_kwargs=True),
        model.register_forward_hook(leave, always_call=True),
    )


def attends_alone(model: nn.Module) -> str:
    """What is wrong with a model whose attention is its own."""
    found = next((why for m in model.modules() if (why := row_of(REFUSED, m))), None)
    if found is not None:
        return f"attention of {type(model).__name__} {found}, of which WallFacer has no gradient"
    return (
        f"no layer of {type(model).__name__} (transformers {transformers.__version__}) asks "
        "transformers' attention registry: every rank would attend to its own tokens only. Take a "
        "model whose attention does, or a transformers in which this one's does"
    )


def can_ask(model: PreTrainedModel) -> bool:
    """Whether a layer of the model may ask us: by the registry, by what we replace, by itself."""
    by_itself = bool(unasking(model)) or has_mixers(model) or bool(receivers(model))
    return by_itself or asks_registry(model)


def is_applied(model: nn.Module) -> bool:
    """Whether `apply` was called on this very module, or on one that it is a copy of."""
    return APPLIED in vars(model)
