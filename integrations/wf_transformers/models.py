"""What can be told of a model by looking at it: its parts, its head, what cannot be spread."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import transformers
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto import modeling_auto

from wf_backends.dsp import RECEIVER
from wf_transformers.families.mixers import mixer_of

Head = Literal["causal", "masked", "other"]
REGISTRY = "ALL_ATTENTION_FUNCTIONS"  # what files whose attention asks the registry import
VARYING_ROPE = ("dynamic", "longrope")
MIXING_ENDS = {
    "Indexer": "an indexer, which chooses the keys of each query by their scores",
    "Compressor": "a compressor, which makes one key of several tokens",
}
"""Ends of class names: parts of sparse attention (DeepSeek V3.2 and V4, GLM-5), which shows only
in sequences longer than what it chooses from."""


def own_class(module: nn.Module) -> type:
    """Transformers' class of a module: a subclass counts as what it derives from, FSDP2's too."""
    kinds = type(module).__mro__
    own = (kind for kind in kinds if kind.__module__.startswith("transformers.models."))
    return next(own, type(module))


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


def refuse_unspreadable(model: PreTrainedModel) -> None:
    """Refuse a model of tokens that would be wrong with its tokens on several ranks.

    Raises:
        NotImplementedError: for rotary frequencies that follow from the longest position, and for
            layers other than attention that mix tokens.
    """
    refuse_varying_rope(type(model).__name__, model.config)
    refuse_mixing(model)


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


def refuse_mixing(model: nn.Module) -> None:
    """Refuse layers of `model` that mix tokens and are no attention over the ranks.

    Modules that are given the SequenceParallel are left alone, models of images or sounds, and
    layers in the table of mixers.py.

    Raises:
        NotImplementedError: naming the first one.
    """
    for name, module in model.named_modules():
        what = _mixes(module)
        if what is not None and not _is_left_alone(model, name):
            raise NotImplementedError(
                f"{type(model).__name__}.{name} is {what}: only attention may mix tokens that are "
                "on several ranks"
            )


def _mixes(module: nn.Module) -> str | None:
    """What a module is, if it mixes tokens."""
    kind = type(module).__name__
    if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)) and module.kernel_size[0] > 1:
        return f"a convolution over tokens, kernel_size {module.kernel_size[0]}"
    if isinstance(module, nn.RNNBase):
        return f"a recurrence over tokens, {kind}"
    if isinstance(module, nn.MultiheadAttention):
        return "torch's own attention, over this rank's tokens"
    if isinstance(module, _BatchNorm):
        return f"a mean over all tokens of a batch, {kind}"
    name = own_class(module).__name__
    return next((what for end, what in MIXING_ENDS.items() if name.endswith(end)), None)


def _is_left_alone(model: nn.Module, name: str) -> bool:
    """Whether a module is inside one that cuts what it mixes, or takes images or sounds."""
    parts = name.split(".")
    around = [model.get_submodule(".".join(parts[:n])) for n in range(len(parts) + 1)]
    return any(
        hasattr(one, RECEIVER) or _takes_no_tokens(one) or mixer_of(one) is not None
        for one in around
    )


def _takes_no_tokens(module: nn.Module) -> bool:
    """Whether a module is a model of patches or sounds, cut behind layers that mix these."""
    return isinstance(module, PreTrainedModel) and module.main_input_name != "input_ids"


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
