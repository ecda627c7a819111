"""What can be told of a model by looking at it: its parts, its head, what cannot be spread."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import transformers
from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto import modeling_auto

Head = Literal["causal", "masked", "other"]
REGISTRY = "ALL_ATTENTION_FUNCTIONS"  # what files whose attention asks the registry import
Row = TypeVar("Row")
VARYING_ROPE = ("dynamic", "longrope")


def own_class(module: nn.Module) -> type:
    """Transformers' class of a module: a subclass counts as what it derives from, FSDP2's too."""
    kinds = type(module).__mro__
    own = (kind for kind in kinds if kind.__module__.startswith("transformers.models."))
    return next(own, type(module))


def row_of(table: Mapping[str, Row], module: nn.Module) -> Row | None:
    """What a table of transformers' classes by name has for a module, or for one of its bases."""
    kinds = (k for k in type(module).__mro__ if k.__module__.startswith("transformers.models."))
    return next((table[kind.__name__] for kind in kinds if kind.__name__ in table), None)


def outermost(module: nn.Module) -> list[PreTrainedModel]:
    """The Hugging Face models in `module`, itself included, that are not inside another."""
    if isinstance(module, PreTrainedModel):
        return [module]
    return list(dict.fromkeys(m for child in module.children() for m in outermost(child)))


def inner_models(module: nn.Module) -> list[PreTrainedModel]:
    """The Hugging Face models in `module`, at any depth, without itself."""
    return [m for m in module.modules() if isinstance(m, PreTrainedModel) and m is not module]


def token_model(model: PreTrainedModel) -> PreTrainedModel:
    """The model without heads in `model`, which has the layers: OPT's decoder, else its base."""
    base: Any = model.base_model
    decoder = getattr(base, "decoder", None)
    return decoder if isinstance(decoder, PreTrainedModel) else base


def head_of(module: nn.Module) -> Head:
    """What the labels of `module` are: the next token, the token itself, or we do not know.

    Told by transformers' own tables; a subclass counts as the class that it comes from. Of several
    models in one module all must say the same.
    """
    heads: set[Head] = {_head(type(model)) for model in outermost(module)}
    return heads.pop() if len(heads) == 1 else "other"


def _head(kind: type) -> Head:
    names = {base.__name__ for base in kind.__mro__}
    causal = bool(names & names_of("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"))
    masked = bool(names & names_of("MODEL_FOR_MASKED_LM_MAPPING_NAMES"))
    if causal == masked:
        return "other"
    return "causal" if causal else "masked"


def names_of(table: str) -> set[str]:
    """The class names in a table of transformers, whose values are names or tuples of them."""
    values = getattr(modeling_auto, table).values()
    return {name for v in values for name in ((v,) if isinstance(v, str) else v)}


def asks_registry(model: PreTrainedModel) -> bool:
    """False where no layer can ask transformers' registry of attention functions.

    Only told of transformers' own models: what a file of somebody else's asks, a forward shows.
    (`_supports_attention_backend` says no of models that do ask, GPT-2 and ViT of 4.51 among them.)
    """
    if not type(model).__module__.startswith("transformers.models."):
        return True
    files = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    files.discard(PreTrainedModel.__module__)
    return any(hasattr(sys.modules.get(file), REGISTRY) for file in files)


def refuse_virtual_tokens(model: nn.Module) -> None:
    """Refuse PEFT's prompt and prefix tuning, whose tokens stand before the whole sequence.

    Raises:
        NotImplementedError: naming the kind.
    """
    for module in model.modules():
        adapters = getattr(module, "peft_config", None)
        for config in adapters.values() if isinstance(adapters, Mapping) else ():
            if getattr(config, "is_prompt_learning", False):
                kind = getattr(config.peft_type, "value", config.peft_type)
                raise NotImplementedError(
                    f"PEFT's {kind}: its virtual tokens would stand before every rank's part of "
                    "the sequence; take LoRA, or another kind without virtual tokens"
                )


def tell_windows(model: PreTrainedModel) -> None:
    """Warn where this transformers' own attention gives windows to layers that have none.

    Qwen2 and Qwen3 of transformers 4 build one mask by the config's window for all layers. Their
    layers, flash attention there, and transformers 5 know `max_window_layers`, as we do.
    """
    config = model.config
    first = getattr(config, "max_window_layers", None)
    named = getattr(config, "layer_types", None) is not None
    if first and getattr(config, "use_sliding_window", False) and not named:
        warnings.warn(
            f"{type(model).__name__}: layers from max_window_layers={first} on have a sliding "
            "window here, as under flash attention and in transformers 5; eager and sdpa attention "
            f"of transformers {transformers.__version__} give one to all layers",
            stacklevel=2,
        )


def refuse_varying_rope(name: str, config: Any) -> None:
    """Refuse rotary frequencies that a rank would derive from the longest position that it sees.

    Raises:
        NotImplementedError: naming the model or layer `name` and the kind.
    """
    kind = _varying_rope(config)
    if kind is not None:
        raise NotImplementedError(
            f'{name} has rope_type "{kind}": its frequencies follow from the longest position of '
            f"a call, and ranks see different ones. Take one that does not vary, such as "
            f'"default", "linear", "yarn" or "llama3"'
        )


def _varying_rope(config: Any) -> str | None:
    for attribute in ("rope_parameters", "rope_scaling"):  # of transformers 5, of 4
        words = getattr(config, attribute, None)
        if isinstance(words, Mapping):
            by_layers = [w for w in words.values() if isinstance(w, Mapping)] or [words]
            kinds = [w.get("rope_type", w.get("type")) for w in by_layers]
            return next((kind for kind in kinds if kind in VARYING_ROPE), None)
    return None
