"""Attaching one model instance. Every change puts its reversal into `handle.undo`."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import transformers
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from wf_backends import SequenceParallel
from wf_backends._compile import eager
from wf_backends.dsp import DynamicSequenceParallel, Mode, Stages, receivers, spread
from wf_transformers.attention.documents import OF_CALLS, of_call
from wf_transformers.attention.positions import correct_positions
from wf_transformers.attention.registry import register_free, registered_for
from wf_transformers.calls import (
    NOT_LOCAL,
    TOKENS,
    Kwargs,
    by_name,
    parameter_names,
    refuse_call,
    refuse_media,
    refuse_partial_states,
    refuse_tokens,
    refuse_unsupported,
    takes_any_keyword,
    tokens_of,
)
from wf_transformers.families.compressors import compress_over_ranks
from wf_transformers.families.experts import RouterLoss, has_router_loss
from wf_transformers.families.indexers import choose_over_ranks
from wf_transformers.families.media_features import hook_media
from wf_transformers.families.media_table import language_model, media_of
from wf_transformers.families.mixing import mixers_in, refuse_unspreadable, spread_mixers
from wf_transformers.families.stacks import cut_inside, is_cut_inside, stacks_of
from wf_transformers.families.table import MLA, REFUSED, changes_in, modules_without_registry
from wf_transformers.handle import Handle
from wf_transformers.memory.checkpoints import recompute_checkpoints_with_documents
from wf_transformers.memory.tiles import recompute_with_documents
from wf_transformers.models import (
    file_of,
    inner_models,
    outermost,
    row_of,
    uses_registry,
    warn_about_shared_keys,
    warn_about_windows,
)
from wf_transformers.replace import run_hooks_inside_peft
from wf_transformers.rng import RankRng
from wf_transformers.tensor_parallel import check_tensor_parallel

NEVER = ("output_attentions", "head_mask")
"""Arguments of calls that attention does not support. ViT gives it a head mask as its mask."""
APPLIED_MARK = "wallfacer_applied"
"""Attribute set on a model whose hooks give the documents of each call to its Attention."""


def attach_pretrained(model: nn.Module, sp: SequenceParallel) -> Handle:
    """Register an unused name for `sp`, switch the Hugging Face models in `model` (or `model`
    itself) to it, and prepare them.

    All models get the same name, because they may share the config that holds it.
    """
    handle = register_free(sp)
    with handle.removed_on_error():
        for pretrained in outermost(model):
            hook_media(pretrained, handle)
            _set_name(language_model(pretrained), handle)
            prepare(language_model(pretrained), handle)
        run_hooks_inside_peft(model, handle.undo)
    return handle


def attach_stages(
    model: nn.Module, sp: SequenceParallel, stages: Stages, verify: Mode = True
) -> Handle:
    """Change between the stages of `model` which dimension is split over the ranks of `sp` (DSP).

    Args:
        verify: whether to compare the first forward with one on a single rank; True, False or
            "strict".
    """
    handle = Handle(sp)
    dsp = DynamicSequenceParallel(sp.comm, gradients="averaged")
    handle.undo.callback(spread(model, sp, dsp, stages, verify).remove)
    return handle


def _set_name(model: Any, handle: Handle) -> None:
    can_set = getattr(model, "_can_set_attn_implementation", None)  # since 4.54
    if can_set is not None and can_set():
        handle.undo.callback(model.set_attn_implementation, model.config._attn_implementation)
        model.set_attn_implementation(handle.name)
        return
    if can_set is not None and hasattr(file_of(model), "create_causal_mask"):
        return  # without the registry, as MPT: it would build masks for this name
    # GPT-2 of transformers 4 also keeps the name in its modules
    modules = (module for module in model.modules() if "_attn_implementation" in vars(module))
    for owner in (model.config, *modules):
        handle.set(owner, "_attn_implementation", handle.name)


def prepare(model: PreTrainedModel, handle: Handle) -> None:
    """Do what a registered name alone cannot: modules without the registry, documents, patches."""
    spread_mixers(model, handle)
    choose_over_ranks(model, handle)
    compress_over_ranks(model, handle)
    if not stacks_of(model):
        correct_positions(model, handle)
    if handle.sp.size > 1:
        refuse_unspreadable(model)
        check_tensor_parallel(model, handle)
    warn_about_windows(model)
    warn_about_shared_keys(model)
    handle.attention.record_layer_names(model)
    for module, attributes in changes_in(model, handle.attention):
        for name, value in attributes.items():
            handle.set(module, name, value)
    cut_inside(model, handle)
    if handle.sp.size > 1 and not stacks_of(model):
        _seed_by_rank(model, handle)
    if has_router_loss(model) and not stacks_of(model):
        RouterLoss(model, handle)
    _check_calls(model, handle)
    recompute_with_documents(model, handle)


def _seed_by_rank(model: nn.Module, handle: Handle) -> None:
    """Give every rank its own random state in training forwards, so that dropout masks differ; also
    in those of the models inside, which scripts may call for hidden states."""
    rng, documents = RankRng(handle.sp), handle.attention.documents
    restore = eager(rng.leave)

    @eager
    def seed(called: nn.Module, args: tuple[Any, ...], kwargs: Kwargs) -> None:
        tokens = tokens_of(by_name(parameter_names(called), args, kwargs))
        if tokens is not None and model not in handle.attention.cut_by_heads:
            rng.enter(called, tokens.device)

    def enter(called: nn.Module, args: tuple[Any, ...], kwargs: Kwargs) -> None:
        if called is model or documents.running is None:  # else `model` runs, which has entered
            seed(called, args, kwargs)

    def leave(called: nn.Module, *_: Any) -> None:
        if called is model or documents.running is None:
            restore()

    for called in (model, *inner_models(model)):
        handle.before(called, enter)
        handle.after(called, leave, always=True)


def send_latents(model: nn.Module, handle: Handle) -> None:
    """Make multi-head latent attention of an attached model send latents, not keys and values."""
    layers = [(m, forward) for m in model.modules() if (forward := row_of(MLA, m))]
    if not layers:
        raise ValueError(
            f'"latents": true is for models with {" or ".join(MLA)} of transformers, and '
            f"{type(model).__name__} has none: leave it out"
        )
    if not handle.attention.name:
        raise ValueError('"latents": true is for attention over the ranks, and not beside "dsp"')
    for module, forward in layers:
        handle.set(module, "wallfacer", handle.attention)
        handle.set(module, "forward", MethodType(forward, module))


def _check_calls(model: PreTrainedModel, handle: Handle) -> None:
    """Check the arguments of every call of the model, and scope the documents of the call."""
    attention = handle.attention
    names, takes_kwargs = parameter_names(model), takes_any_keyword(model)
    has_stacks, takes_whole = bool(stacks_of(model)), is_cut_inside(model)

    def check(args: tuple[Any, ...], kwargs: Kwargs) -> Kwargs:
        arguments = by_name(names, args, kwargs)
        refuse_unsupported(type(model).__name__, {key: arguments.get(key) for key in NEVER})
        if handle.sp.size > 1:
            unsplit = TOKENS if has_stacks or model in attention.cut_by_heads else ()
            whole = (*unsplit, *NOT_LOCAL) if attention.cache is not None else unsplit
            split = {key: value for key, value in arguments.items() if key not in whole}
            refuse_call(model, split, names, attention.logits_are_whole)
            if media_of(model) is None:
                refuse_media(model, split if has_stacks else arguments)
            if takes_whole:
                refuse_partial_states(model, arguments)
            tokens = tokens_of(split)
            attention.documents.expect(0 if tokens is None else tokens.shape[1])
            if tokens is None:
                with handle.advising():
                    handle.sp.check_same(arguments)
        recompute_checkpoints_with_documents(model, handle)
        if not takes_kwargs:
            kwargs = without_documents(args, kwargs)  # models with ALiBi take no position_ids
            return {k: x for k, x in kwargs.items() if k != "position_ids" or k in names}
        # After a call with documents, a recomputed layer must find that this call has none
        says_none = attention.documents.used and tokens_of(arguments) is not None
        return ({"cu_seqlens": None} if says_none else {}) | kwargs

    problem = None if receivers(model) else no_registry_error(model)
    scope_documents(model, handle, check, problem)
    handle.set(model, APPLIED_MARK, True)
    if handle.sp.size > 1:
        _check_inner_models(model, handle)


def _check_inner_models(model: PreTrainedModel, handle: Handle) -> None:
    """Check calls of the models inside `model`: scripts may call them for hidden states."""
    takes_whole = is_cut_inside(model)

    def check(inner: nn.Module, args: tuple[Any, ...], kwargs: Kwargs) -> None:
        names, running = parameter_names(inner), handle.attention.documents.running
        arguments = by_name(names, args, kwargs)
        if takes_whole:
            refuse_partial_states(inner, arguments, inside=True)
        if running is not None and running.rows == 0:  # attention raises by itself
            return
        if handle.attention.logits_are_whole:
            refuse_partial_states(inner, arguments)
        refuse_tokens(inner, arguments, names)

    for inner in inner_models(model):
        handle.before(inner, check)


def without_documents(_: tuple[Any, ...], kwargs: Kwargs) -> Kwargs:
    """The keyword arguments of a call without documents and slices, for models without these."""
    return {key: value for key, value in kwargs.items() if key not in OF_CALLS}


def scope_documents(
    model: nn.Module,
    handle: Handle,
    change: Callable[[tuple[Any, ...], Kwargs], Kwargs],
    problem: str | None,
) -> None:
    """Around every forward of the model, let attention know the documents of this call.

    Args:
        change: (args, kwargs) of a call -> the kwargs that the model gets; may raise.
        problem: text of the `NotImplementedError` raised after a forward on several ranks in which
            no layer called our attention. None: that is no error.
    """
    attention = handle.attention
    attention.documents.scoped = True

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: Kwargs) -> tuple[Any, Kwargs]:
        attention.documents.push(of_call(kwargs))  # before any error: `pop` always runs
        attention.was_called = False
        return args, change(args, kwargs)

    def check_was_called(*_: Any) -> None:
        if not attention.was_called and registered_for(model) in (None, attention):
            name = getattr(getattr(model, "config", None), "_attn_implementation", None)
            if attention.name and name not in (None, attention.name):
                raise NotImplementedError(
                    f"attention was set to {name!r} after attach, and ours is {attention.name!r}: "
                    "set_attn_implementation goes before"
                )
            raise NotImplementedError(problem)
        # otherwise another name of ours: the model was attached once more

    if problem is not None and handle.sp.size > 1:
        handle.after(model, check_was_called)
    handle.before(model, enter)
    handle.after(model, attention.documents.pop, always=True)


def no_registry_error(model: nn.Module) -> str:
    """The error for a model whose attention never reaches ours."""
    if (reason := _refused_reason(model)) is not None:
        return f"attention of {type(model).__name__} {reason}, of which WallFacer has no gradient"
    return (
        f"no layer of {type(model).__name__} (transformers {transformers.__version__}) asks "
        "transformers' attention registry: every rank would attend to its own tokens only. Take a "
        "model whose attention does, or a transformers in which this one's does"
    )


def _refused_reason(model: nn.Module) -> str | None:
    return next(filter(None, (row_of(REFUSED, module) for module in model.modules())), None)


def refuse_local_attention(model: PreTrainedModel) -> None:
    """Refuse a model whose layers cannot all call our attention: by the registry, by a method that
    we replace, or by themselves."""
    replaced = modules_without_registry(model) or mixers_in(model) or receivers(model)
    if _refused_reason(model) is not None or not (replaced or uses_registry(model)):
        raise NotImplementedError(no_registry_error(model))


def is_applied(model: nn.Module) -> bool:
    """Whether `apply` was called on this module, or on the module that it was copied from."""
    return APPLIED_MARK in vars(model)
