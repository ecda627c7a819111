"""Inspection of models: their class, parts and head, and settings that ranks cannot share."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from copy import deepcopy
from functools import lru_cache
from inspect import signature
from typing import Any, Literal, TypeVar

import transformers
from torch import nn
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.auto import modeling_auto

Head = Literal["causal", "masked", "other"]
REGISTRY = "ALL_ATTENTION_FUNCTIONS"  # imported by the files whose attention uses the registry
Row = TypeVar("Row")
WINDOWS = ("sliding_window", "window_size", "local_attention")  # config fields
VARYING_ROPE = ("dynamic", "longrope")
AGREED = "wallfacer_longest"
"""Attribute set on modules whose rotary frequencies follow from the longest position of all ranks,
and on the models and layers that share their config."""


def transformers_class(module: nn.Module) -> type:
    """The class in transformers.models that a module's class is or derives from (FSDP2 derives
    classes), else its class."""
    return next(iter(transformers_classes(type(module))), type(module))


def file_of(module: nn.Module) -> Any:
    """The file of transformers that defines the class of a module, or its base class."""
    return sys.modules[transformers_class(module).__module__]


def has_module(model: nn.Module, name: str) -> bool:
    """Whether a module in `model` is of a class of transformers with this name."""
    return any(transformers_class(module).__name__ == name for module in model.modules())


def row_of(table: Mapping[str, Row], module: nn.Module) -> Row | None:
    """The table's value for a module, by the name of its transformers class or of a base of it."""
    names = (cls.__name__ for cls in transformers_classes(type(module)))
    return next((table[name] for name in names if name in table), None)


@lru_cache(maxsize=1024)  # asked for every module in every call
def transformers_classes(cls: type) -> tuple[type, ...]:
    """A class and its bases, as far as transformers.models defines them, the most derived first."""
    return tuple(c for c in cls.__mro__ if c.__module__.startswith("transformers.models."))


def outermost(module: nn.Module) -> list[PreTrainedModel]:
    """The Hugging Face models in `module` (or `module` itself) that are not inside another one."""
    if isinstance(module, PreTrainedModel):
        return [module]
    return list(dict.fromkeys(m for child in module.children() for m in outermost(child)))


def without_peft(model: nn.Module) -> nn.Module:
    """The model inside PEFT's, which is called with the same arguments; another model as it is."""
    get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if get_base_model else model


def inner_models(module: nn.Module) -> list[PreTrainedModel]:
    """The Hugging Face models inside `module`, at any depth, without `module`."""
    return [m for m in module.modules() if isinstance(m, PreTrainedModel) and m is not module]


def token_model(model: PreTrainedModel) -> PreTrainedModel:
    """The model without head inside `model`, which has the layers: OPT's decoder, else the base."""
    base: Any = model.base_model
    decoder = getattr(base, "decoder", None)
    return decoder if isinstance(decoder, PreTrainedModel) else base


def head_of(module: nn.Module) -> Head:
    """What labels mean: "causal" the next token, "masked" the token itself, "other" unknown.

    Read from transformers' tables by class or base class. "other" if models in `module` differ.
    """
    heads: set[Head] = {_head(type(model)) for model in outermost(module)}
    return heads.pop() if len(heads) == 1 else "other"


def _head(cls: type) -> Head:
    names = {base.__name__ for base in cls.__mro__}
    causal = bool(names & class_names_in("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"))
    masked = bool(names & class_names_in("MODEL_FOR_MASKED_LM_MAPPING_NAMES"))
    if causal == masked:
        return "other"
    return "causal" if causal else "masked"


def class_names_in(table: str) -> set[str]:
    """The class names in a table of transformers, whose values are names or tuples of names."""
    values = getattr(modeling_auto, table).values()
    return {name for v in values for name in ((v,) if isinstance(v, str) else v)}


def uses_registry(model: PreTrainedModel) -> bool:
    """Whether a layer may look up its attention function in transformers' registry.

    True for models that transformers does not define: only a forward shows what they do.
    (`_supports_attention_backend` is False in models that do, such as GPT-2 and ViT of 4.51.)
    """
    if not type(model).__module__.startswith("transformers.models."):
        return True
    files = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    files.discard(PreTrainedModel.__module__)
    registries = (getattr(sys.modules.get(file), REGISTRY, None) for file in files)
    return any(registry is ALL_ATTENTION_FUNCTIONS for registry in registries)  # Doge has its own


def with_torch_attention(config: Any) -> Any:
    """A copy of a config for modules that call torch's attention, and not the registry's."""
    config = deepcopy(config)
    config._attn_implementation = "sdpa"
    return config


def refuse_adapters(model: nn.Module) -> None:
    """Refuse PEFT's prompt and prefix tuning, which put tokens in front of the sequence, AdaLoRA,
    which adds a penalty to the loss that the model inside computes: here it is None, and activated
    LoRA, which looks for tokens of a prompt among those of its own rank.
    """
    for module in model.modules():
        adapters = getattr(module, "peft_config", None)
        for config in adapters.values() if isinstance(adapters, Mapping) else ():
            peft_type = getattr(config.peft_type, "value", config.peft_type)
            if peft_type == "ADALORA":
                raise NotImplementedError("PEFT's ADALORA: its penalty would be lost; take LoRA")
            if getattr(config, "alora_invocation_tokens", None):
                raise NotImplementedError(
                    "PEFT's alora_invocation_tokens: an activated LoRA acts from these tokens on, "
                    "and other ranks do not see them; leave them out"
                )
            if getattr(config, "is_prompt_learning", False):
                raise NotImplementedError(
                    f"PEFT's {peft_type}: its virtual tokens would stand before every rank's part "
                    "of the sequence; take LoRA, or another kind without virtual tokens"
                )


def windows_of(module: nn.Module) -> list[int]:
    """The sliding windows in the configs of Hugging Face models in `module`, or in the layers if
    these differ (transformers 5)."""
    windows: list[Any] = []
    for model in outermost(module) or [module]:
        config = getattr(model, "config", None)
        config = config.get_text_config() if isinstance(config, PretrainedConfig) else config
        try:
            windows += [getattr(config, name, None) for name in WINDOWS]
        except Exception:  # transformers' own class for configs whose layers differ
            windows += [getattr(layer, WINDOWS[0], None) for layer in model.modules()]
    return [window for window in windows if isinstance(window, int) and window > 0]


def warn_about_windows(model: PreTrainedModel) -> None:
    """Warn where eager and sdpa attention of transformers apply the sliding window differently.

    Qwen2 and Qwen3 of transformers 4 build one mask with the config's window for all layers. Flash
    attention, transformers 5 and WallFacer respect `max_window_layers`.
    """
    config = model.config
    first_layer = getattr(config, "max_window_layers", None)
    has_layer_types = getattr(config, "layer_types", None) is not None
    if first_layer and getattr(config, "use_sliding_window", False) and not has_layer_types:
        warnings.warn(
            f"{type(model).__name__}: layers from max_window_layers={first_layer} on have a "
            "sliding window here, as under flash attention and in transformers 5; eager and sdpa "
            f"attention of transformers {transformers.__version__} give one to all layers",
            stacklevel=2,
        )


def warn_about_shared_keys(model: nn.Module) -> None:
    """Warn where layers take the keys of an earlier layer only out of a KV cache.

    Gemma 3n of transformers 4.53 to 5.3 does: without a cache, as in training, they make their own.
    Later ones pass `shared_kv_states` from layer to layer.
    """
    for module in model.modules():
        if not getattr(module, "is_kv_shared_layer", False):
            continue
        if "shared_kv_states" not in signature(module.forward).parameters:
            warnings.warn(
                f"{type(model).__name__}: without a KV cache, as in training and over ranks, its "
                "last layers make keys and values of their own in transformers "
                f"{transformers.__version__}; in later releases they share those of earlier layers",
                stacklevel=2,
            )
            return


def refuse_varying_rope(module: nn.Module) -> None:
    """Refuse rotary frequencies that depend on the largest position in a call, where ranks do not
    agree on it.
    """
    name, config = type(module).__name__, getattr(module, "config", None)
    rope_type = varying_rope(config)
    if rope_type is not None and AGREED not in vars(module):
        raise NotImplementedError(
            f'{name} has rope_type "{rope_type}": its frequencies follow from the longest position '
            "of a call, and a rank sees its own only. wf_transformers.attach and apply give "
            "transformers' own rotary modules that of all ranks; a model with others must take a "
            'type that does not vary, such as "default", "linear", "yarn" or "llama3"'
        )


def varying_rope(config: Any) -> str | None:
    """The first rope_type in a config whose frequencies follow from the longest position."""
    for attribute in ("rope_parameters", "rope_scaling"):  # of transformers 5, of 4
        rope = getattr(config, attribute, None)
        if isinstance(rope, Mapping):
            by_layer_type = [x for x in rope.values() if isinstance(x, Mapping)] or [rope]
            rope_types = [x.get("rope_type", x.get("type")) for x in by_layer_type]
            return next((x for x in rope_types if x in VARYING_ROPE), None)
    return None
