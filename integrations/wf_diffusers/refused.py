"""Calls of a transformer of diffusers of which a rank cannot compute its part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from wf_diffusers.cuts import Family

ATTENTION_KWARGS = ("joint_attention_kwargs", "attention_kwargs")
CACHE = (
    "a cache that skips blocks by the values of tokens: a rank has only some of them, and ranks "
    "would skip different blocks. Call disable_cache() first"
)
HOOKS: Mapping[str, str] = {
    "AttentionProcessorSkip": "a guidance that takes values instead of attention (perturbed "
    "attention): skip whole blocks, other than the first",
    "FBC": CACHE,
    "SeaCache": CACHE,
    "SmoothedEnergy": "a guidance that smooths the queries of neighbouring tokens: a rank has "
    "only some of them. Use another guidance",
}
"""How the names of hooks of diffusers begin that are not supported, and why."""

MODELS: Mapping[str, str] = {
    "BriaFibo": "its text is in two halves, of which every block takes another second one",
    "HiDreamImage": "its text is in three parts, of which every block takes another third one",
    "Latte": "it attends over frames and over places in turn: docs/dsp.md splits that",
    "OmniGen": "its text sees earlier tokens only, by a mask of all tokens",
    "QwenImage21": "its text and the images given see earlier tokens only",
    "Sana": "linear attention sums over all tokens, and convolutions mix neighbouring ones",
}
"""How the names of models begin that cannot be split as the others are, and why."""


def why_not(model: nn.Module, supported: Sequence[str]) -> str:
    """Say why a model is none of the supported ones, and what to attach if one is inside of it."""
    name = type(model).__name__
    reason = next((f" ({why})" for begin, why in MODELS.items() if name.startswith(begin)), "")
    inside = (
        f". Attach the {type(module).__name__} inside of it, its {path}"
        for path, module in model.named_modules()
        if type(module).__name__ in supported
    )
    return (
        f"{name} is none of the models of diffusers that WallFacer supports{reason}: "
        f"{', '.join(supported)}{next(inside, '')}"
    )


def refuse_call(model: nn.Module, arguments: Mapping[str, Any], family: Family) -> None:
    """Refuse a call of which a rank cannot compute its part."""
    name = type(model).__name__
    if getattr(model, "_parallel_config", None) is not None:
        raise NotImplementedError(
            f"{name} has diffusers' own parallelism, by enable_parallelism(...) or "
            "parallel_config=: it splits the same tokens or heads. Leave it out"
        )
    key, value = family.refused_config
    if key and getattr(model.config, key, None) == value:
        raise NotImplementedError(f"{name} has {key}={value!r}, which is not supported")
    for key, description in family.refused:
        value = arguments.get(key)
        if value is not None:
            raise NotImplementedError(f"{name} was called with {key}: {description}")
    for key in ATTENTION_KWARGS:
        if (arguments.get(key) or {}).keys() - {"scale"}:  # the scale of adapters
            raise NotImplementedError(
                f"{name} was called with {key}: arguments of attention, such as an IP-Adapter's"
            )
    cuts_timesteps = any(cut.ndim for cut in family.cuts)
    timestep = arguments.get("timestep")
    if isinstance(timestep, Tensor) and timestep.dim() > 1 and not cuts_timesteps:
        raise NotImplementedError(
            f"{name} was called with a timestep {tuple(timestep.shape)}: timesteps of tokens would "
            "have to be cut; give one timestep for each sample"
        )
    dropout_rates = (m.p for m in model.modules() if isinstance(m, nn.Dropout))
    if model.training and any(rate > 0 for rate in dropout_rates):
        raise NotImplementedError(
            f"{name} has dropout, and all ranks would drop the same elements, each of its own "
            "tokens: set it to 0, or call model.eval()"
        )
    _refuse_hooks(model)


def refuse_cache(model: Any) -> None:
    """Refuse a cache for samples that are computed one after the other."""
    if getattr(model, "is_cache_enabled", False):
        raise NotImplementedError(
            f"{type(model).__name__} has a cache, and texts of different lengths in the samples: "
            "they are computed one after the other, and the cache would take each for a step. "
            "Give one sample in each call, or call disable_cache() first"
        )


def _refuse_hooks(model: nn.Module) -> None:
    for path, module in model.named_modules():
        registry = vars(module).get("_diffusers_hook")
        for hook in registry.hooks.values() if registry else ():
            kind = type(hook).__name__
            for beginning, description in HOOKS.items():
                if kind.startswith(beginning):
                    raise NotImplementedError(
                        f"{type(model).__name__} has a {kind} of {path}, {description}"
                    )
