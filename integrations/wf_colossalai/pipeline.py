"""A model as one stage of ColossalAI's pipeline, by the forward that transformers gives it.

ColossalAI cuts the layers, releases what a stage does not hold, and sends hidden states. Its own
pipeline forwards are not used: each is written for one family, and several build a mask of S x S
elements or fail without labels. Here the model's own forward runs on every stage, over the stage's
layers: what stands before them is passed over but on the first stage, and what stands behind
them but on the last. So a stage does what the whole model does, whatever its family.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import torch
from colossalai.pipeline.stage_manager import PipelineStageManager
from torch import Tensor, nn

from wf_transformers import Handle
from wf_transformers.calls import parameter_names, takes_any_keyword
from wf_transformers.models import token_model

Words = dict[str, Any]
STATES = "hidden_states"
FROM_SCHEDULE = (STATES, "stage_index")
"""What ColossalAI's schedules add to a call: the output of the stage before, and which layers."""


class Stage:
    """The forwards and hooks of one model; `handle.remove()` takes them back.

    Args:
        model: with all its layers, those of other stages without parameters.
        stages: which stage this rank is, and with several chunks of a model which one runs.
        handle: what attached the model, all of whose other hooks are there already.
    """

    def __init__(self, model: Any, stages: PipelineStageManager, handle: Handle) -> None:
        self._model, self._stages = model, stages
        self._inner = token_model(model)
        self._holder, self._name = _find_layers(self._inner)
        self._layers: nn.ModuleList = getattr(self._holder, self._name)
        self._states: Tensor | None = None
        self._behind = False  # whether a layer of the running forward has been called
        forward = update_wrapper(partial(self._forward), model.forward)
        handle.set(model, "forward", forward)
        for part in _around(self._inner, self._layers):
            handle.set(part, "forward", partial(self._pass_over, part, part.forward))
        inner = self._inner
        if not stages.is_first_stage(ignore_chunk=True):
            _say_dtype(inner, handle)
        handle.hooks(
            model.register_forward_pre_hook(self._take_states, prepend=True, with_kwargs=True),
            inner.register_forward_pre_hook(self._enter, with_kwargs=True),
            inner.register_forward_hook(self._leave, always_call=True),
            *(layer.register_forward_pre_hook(self._at_layer) for layer in self._layers),
        )

    def _take_states(self, _: nn.Module, args: tuple[Any, ...], kwargs: Words) -> Any:
        self._states = kwargs.get(STATES)
        return args, {key: x for key, x in kwargs.items() if key not in FROM_SCHEDULE}

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own on the last stage; before it the head is left out."""
        model, inner = self._model, self._inner
        if self._stages.is_last_stage():
            return type(model).forward(model, *args, **kwargs)
        known, heads = parameter_names(inner), parameter_names(model)
        given = dict(zip(heads, args, strict=False)) | kwargs
        passed = (lambda key: key not in heads) if takes_any_keyword(inner) else (lambda _: False)
        output = inner(**{key: x for key, x in given.items() if key in known or passed(key)})
        return {STATES: output[0]}

    def _enter(self, inner: nn.Module, args: tuple[Any, ...], kwargs: Words) -> Any:
        """Only this stage's layers, and the states in place of what the first stage embeds."""
        self._behind = False
        setattr(self._holder, self._name, nn.ModuleList(self._layers[slice(*self._range)]))
        if self._states is None:
            return args, kwargs
        names = parameter_names(inner)
        given = dict(zip(names, args, strict=False)) | kwargs
        if "inputs_embeds" not in names:
            return (), given | {inner.main_input_name: self._states}
        given |= {"input_ids": None, "inputs_embeds": self._states}
        if "token_type_ids" in names:  # else BERT takes them from a buffer of its embeddings
            given["token_type_ids"] = self._states.new_zeros(self._states.shape[:2]).long()
        return (), given

    @property
    def _range(self) -> tuple[int, int]:
        """The layers of this stage, first and behind the last."""
        stages = self._stages
        found: Any = stages.get_stage_index(stages.distribute_layers(len(self._layers)))
        return tuple(found[stages.model_chunk_id] if stages.is_interleave else found)

    def _at_layer(self, *_: Any) -> None:
        self._behind = True

    def _leave(self, *_: Any) -> None:
        setattr(self._holder, self._name, self._layers)
        self._states = None

    def _pass_over(self, part: Any, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A part's own forward on the stage that it is of; elsewhere it gives what it is given."""
        stages = self._stages
        if stages.is_last_stage() if self._behind else stages.is_first_stage():
            return own(*args, **kwargs)
        if hasattr(part, "num_embeddings"):  # to be added to states that have it already
            return torch.zeros(())
        return kwargs.get("inputs_embeds", args[0] if args else None)


def _find_layers(inner: nn.Module) -> tuple[nn.Module, str]:
    """(module, name): which attribute of which module is the list of the model's layers."""
    for module in inner.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList):
                return module, name
    raise AssertionError(f"{type(inner).__name__} has no list of layers, and a policy that cuts it")


def _say_dtype(inner: Any, handle: Handle) -> None:
    """Give a ViT, which asks its projection of pixels for the dtype, one where there is none."""
    patches = getattr(getattr(inner, "embeddings", None), "patch_embeddings", None)
    if patches is not None:
        stand_in = nn.Module()
        stand_in.register_buffer("weight", torch.empty(0, dtype=inner.dtype), persistent=False)
        handle.undo.callback(setattr, patches, "projection", patches.projection)
        patches.projection = stand_in


def _around(inner: nn.Module, layers: nn.ModuleList) -> list[nn.Module]:
    """The outermost modules in `inner` beside its layers; rotary embeddings are of all stages."""
    found = list[nn.Module]()
    for child in inner.children():
        if child is layers or "Rotary" in type(child).__name__:
            continue
        inside = layers in list(child.modules())
        found += _around(child, layers) if inside else [child]
    return found
