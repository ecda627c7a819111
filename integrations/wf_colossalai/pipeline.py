"""Runs a model as one stage of ColossalAI's pipeline, with its own forward from transformers.

ColossalAI distributes the layers, releases the parameters of other stages, and sends hidden states.
Its pipeline forwards are not used: each is written for one family, and several build an S x S mask
or fail without labels. Here the model's own forward runs on every stage, with the layers of the
stage. Modules before the layers (embeddings) run on the first stage only, modules after them (the
final norm) on the last only; elsewhere they return their input. This works for all families.
"""

from __future__ import annotations

from functools import partial, update_wrapper
from typing import Any

import torch
from colossalai.pipeline.stage_manager import PipelineStageManager
from torch import Tensor, nn

from wf_transformers import Handle
from wf_transformers.calls import Kwargs, by_name, parameter_names, takes_any_keyword
from wf_transformers.models import token_model

STATES = "hidden_states"
FROM_SCHEDULE = (STATES, "stage_index")
"""Arguments that ColossalAI's schedules add to a call: the previous stage's output, an index."""


class Stage:
    """The forwards and hooks of one model; `handle.remove()` removes them.

    Args:
        model: with all its layers; those of other stages have no parameters.
        stages: which stage this rank is, and with interleaved stages which model chunk runs.
        handle: the handle of the attached model. All its other hooks are registered before.
    """

    def __init__(self, model: Any, stages: PipelineStageManager, handle: Handle) -> None:
        self._model, self._stages = model, stages
        self._inner = token_model(model)
        self._layers_owner, self._layers_name = _find_layers(self._inner)
        self._layers: nn.ModuleList = getattr(self._layers_owner, self._layers_name)
        ranges: Any = stages.get_stage_index(stages.distribute_layers(len(self._layers)))
        self._layer_ranges = ranges if stages.is_interleave else [ranges]  # of each model chunk
        stages.stage_indices = self._layer_ranges  # not all of ColossalAI's policies set it
        self._states: Tensor | None = None  # the output of the previous stage
        self._reached_layers = False  # whether the running forward has called a layer
        handle.set(model, "forward", update_wrapper(partial(self._forward), model.forward))
        for module in _modules_around(self._inner, self._layers):
            handle.set(module, "forward", partial(self._run_or_skip, module, module.forward))
        inner = self._inner
        if not stages.is_first_stage(ignore_chunk=True):
            _replace_projection(inner, handle)
        handle.before(model, self._take_states, first=True)
        handle.before(inner, self._before_inner)
        handle.after(inner, self._after_inner, always=True)
        for layer in self._layers:
            handle.before(layer, self._before_layer)

    def _take_states(self, _: nn.Module, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
        """Keep the previous stage's output, and remove the schedule's arguments from the call."""
        self._states = kwargs.get(STATES)
        return args, {key: x for key, x in kwargs.items() if key not in FROM_SCHEDULE}

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward on the last stage, and without its head on the others."""
        model, inner = self._model, self._inner
        if self._stages.is_last_stage():
            return type(model).forward(model, *args, **kwargs)
        inner_names, model_names = parameter_names(inner), parameter_names(model)
        arguments = by_name(model_names, args, kwargs)
        passed = [key for key in arguments if key in inner_names]
        if takes_any_keyword(inner):  # the model would pass on its **kwargs
            passed += [key for key in arguments if key not in (*inner_names, *model_names)]
        output = inner(**{key: arguments[key] for key in passed})
        return {STATES: output[0]}

    def _before_inner(self, inner: nn.Module, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
        """Leave only this stage's layers, and pass hidden states (b, s, width) as embeddings."""
        self._reached_layers = False
        start, stop = self._layer_ranges[self._stages.model_chunk_id or 0]
        setattr(self._layers_owner, self._layers_name, nn.ModuleList(self._layers[start:stop]))
        if self._states is None:
            return args, kwargs
        names = parameter_names(inner)
        arguments = by_name(names, args, kwargs)
        if "inputs_embeds" not in names:
            return (), arguments | {inner.main_input_name: self._states}
        arguments |= {"input_ids": None, "inputs_embeds": self._states}
        if "token_type_ids" in names:  # BERT's default is a buffer of its embeddings
            arguments["token_type_ids"] = self._states.new_zeros(self._states.shape[:2]).long()
        return (), arguments

    def _before_layer(self, *_: Any) -> None:
        self._reached_layers = True

    def _after_inner(self, *_: Any) -> None:
        setattr(self._layers_owner, self._layers_name, self._layers)
        self._states = None

    def _run_or_skip(self, module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `forward` on the module's stage, first or last; on others return the input."""
        stages = self._stages
        if stages.is_last_stage() if self._reached_layers else stages.is_first_stage():
            return forward(*args, **kwargs)
        if hasattr(module, "num_embeddings"):  # the hidden states already contain its embeddings
            return torch.zeros(())
        return kwargs.get("inputs_embeds", args[0] if args else None)


def _find_layers(inner: nn.Module) -> tuple[nn.Module, str]:
    """Return (module, name): the list of the model's layers is the attribute `name` of `module`."""
    for module in inner.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList):
                return module, name
    raise AssertionError(f"{type(inner).__name__} has a pipeline policy but no list of layers")


def _replace_projection(inner: Any, handle: Handle) -> None:
    """Replace a ViT's patch projection: its weight is released, but forward reads its dtype."""
    patches = getattr(getattr(inner, "embeddings", None), "patch_embeddings", None)
    if patches is not None:
        projection = nn.Module()
        projection.register_buffer("weight", torch.empty(0, dtype=inner.dtype), persistent=False)
        handle.undo.callback(setattr, patches, "projection", patches.projection)
        patches.projection = projection


def _modules_around(inner: nn.Module, layers: nn.ModuleList) -> list[nn.Module]:
    """Return the outermost modules before and after the layers that not every stage computes."""
    modules: list[nn.Module] = []
    for child in inner.children():
        if child is layers or "Rotary" in type(child).__name__:  # every stage needs rotary angles
            continue
        has_layers = layers in list(child.modules())
        modules += _modules_around(child, layers) if has_layers else [child]
    return modules
