"""Checks of the arguments of models whose tokens are on several ranks, and of their attention
layers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from wf_transformers.attention.documents import NOT_CUT

Kwargs = dict[str, Any]
ON_ONE_PROCESS = (
    "call wf_transformers.generate, or generate on one process, with a model that is not connected "
    "to WallFacer"
)
RIGHT = "call the model with what sp.shard_batch and wf_transformers.forward_kwargs give"
CACHES = ("past_key_values", "cache")
"""Argument names of a KV cache; the second since transformers 5.24."""
CACHE_NAMES = (*CACHES, "past_key_value", "cache_params")
"""Parameters of layers for a cache."""
LOGITS_TO_KEEP = ("logits_to_keep", "num_logits_to_keep")
# Arguments whose meaning for a rank's part differs from that for the whole sequence, and why.
NOT_LOCAL = {
    **dict.fromkeys(CACHES, f"a KV cache is not spread here; {ON_ONE_PROCESS}"),
    **dict.fromkeys(
        LOGITS_TO_KEEP, f"would be counted in this rank's rows; leave it out ({ON_ONE_PROCESS})"
    ),
}
ROUTER_LOGITS = "output_router_logits"
HIDDEN_STATES = "output_hidden_states"
PARTIAL_STATES = (
    "output_hidden_states=True: they would be of this rank's tokens, beside whole logits; leave it "
    "out of the call and the config"
)
TOKENS = ("input_ids", "inputs_embeds")
MEDIA = (
    *("pixel_values", "pixel_values_videos", "pixel_values_images", "image_pixel_values"),
    *("input_features", "input_values", "audio_input_features", "audio_input_ids"),
    *("image_patches", "flattened_patches", "image_embeds", "mm_encoder_outputs"),
)
LEFT_OUT = ("layerdrop", "drop_path_rate")
"""Suffixes of config fields: how often a layer or a branch is left out for a whole sample."""
LABELS = ("labels", "start_positions", "end_positions", "next_sentence_label")
UNSUPPORTED = {
    "head_mask": "head masks",
    "layer_head_mask": "head masks",
    "output_attentions": "output_attentions=True: attention weights are never formed",
    "encoder_hidden_states": "cross attention",
    "past_key_value": "a KV cache",
}
"""Keyword arguments of attention layers that no kernel of ours supports."""
IN_STACK = "wallfacer_stack"
"""Attribute of layers in models that are cut inside: "self" or "cross". Their masks cover all S."""


def parameter_names(model: nn.Module) -> list[str]:
    """The parameter names of the model's forward, in order."""
    return list(inspect.signature(model.forward).parameters)


def takes_any_keyword(model: nn.Module) -> bool:
    """Whether the model's forward has **kwargs that it passes on."""
    parameters = inspect.signature(model.forward).parameters.values()
    usable = (p for p in parameters if p.name != "deprecated_arguments")  # BLOOM refuses these
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in usable)


def by_name(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name; `names` are the parameters of what is called."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


def wants_output(key: str, model: nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Whether an optional output is wanted by the call, or by the config if the call is silent."""
    value, config = arguments.get(key), getattr(model, "config", None)
    return bool(getattr(config, key, False) if value is None else value)


def tokens_of(arguments: Mapping[str, Any]) -> Tensor | None:
    """The ids (b, S) or embeddings (b, S, width) among the arguments of a call, if it has any:
    encoders of images or sounds have none, and are not cut."""
    for key in TOKENS:
        if isinstance(x := arguments.get(key), Tensor):
            if x.dim() < 2:
                got = f"{tuple(x.shape)}: a single sample is {key}[None]"
                raise ValueError(f"{key} must be a tensor (b, S, ...), got {got}")
            return x
    return None


def required_tokens(arguments: Mapping[str, Any]) -> Tensor:
    """As `tokens_of`, of a call or batch that must have tokens."""
    if (tokens := tokens_of(arguments)) is None:
        raise ValueError(f'"input_ids" must be given, got the keys {sorted(arguments)}')
    return tokens


def refuse_call(
    model: nn.Module, arguments: Mapping[str, Any], names: list[str], logits_are_whole: bool = False
) -> None:
    """Refuse a call in which this rank's part would be taken for the whole sequence, or vice versa.

    `names` are the parameters of the model's forward.
    """
    for key, reason in NOT_LOCAL.items():
        value = arguments.get(key)
        if isinstance(value, Tensor) or value not in (None, 0):
            raise NotImplementedError(f"{key}: {reason}")
    if wants_output(ROUTER_LOGITS, model, arguments):
        raise NotImplementedError(
            f"{ROUTER_LOGITS}: the router's loss would be of this rank's tokens only; set it to "
            "False in the call and in the config"
        )
    name, config = type(model).__name__, getattr(model, "config", None)
    for key, value in vars(config).items() if model.training and config is not None else ():
        if key.endswith(LEFT_OUT) and isinstance(value, (int, float)) and value > 0:
            raise NotImplementedError(
                f"{name} is trained with {key}={value}: every rank would leave out other layers, "
                f"or branches of them; set {key} to 0 in the config"
            )
    if tokens_of(arguments) is not None and not logits_are_whole:
        _refuse_labels(name, arguments)
    refuse_tokens(model, arguments, names)


def refuse_media(model: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Refuse images or sounds together with tokens, in models whose media we cannot cut.

    `Documents.check_rows` misses them if a rank has as many patches as tokens.
    """
    media = next((key for key in MEDIA if arguments.get(key) is not None), None)
    if media is not None and tokens_of(arguments) is not None:
        name = type(model).__name__
        raise NotImplementedError(f"{name} was called with {media} beside tokens: {NOT_CUT}")


def refuse_partial_states(
    model: nn.Module, arguments: Mapping[str, Any], inside: bool = False
) -> None:
    """Refuse a call for hidden states, which would be of this rank's tokens beside whole outputs.

    Args:
        inside: whether a model called it. Classifiers of wav2vec 2.0 of transformers 5 always ask
            for them, and drop them unless the config says that they are summed.
    """
    summed = getattr(getattr(model, "config", None), "use_weighted_layer_sum", True)
    if wants_output(HIDDEN_STATES, model, arguments) and (summed or not inside):
        raise NotImplementedError(PARTIAL_STATES)


def _refuse_labels(name: str, arguments: Mapping[str, Any]) -> None:
    label = next((key for key in LABELS if arguments.get(key) is not None), None)
    if label is not None and arguments.get("shift_labels") is None:
        raise ValueError(
            f"{name} was called with {label}: its loss would be of this rank's tokens only, and "
            "not of the next ones where these are on another rank; leave it out and take sp.loss "
            "(engine.wallfacer.loss) of the logits, or have forward_kwargs(..., num_valid=) pass "
            "the labels of a ...ForCausalLM"
        )


def refuse_tokens(model: nn.Module, arguments: Mapping[str, Any], names: list[str]) -> None:
    """Refuse tokens without positions, or with a mask, as of a whole sequence."""
    if tokens_of(arguments) is None:
        return
    name = type(model).__name__
    if "position_ids" in names and arguments.get("position_ids") is None:
        raise ValueError(f"{name} was called without position_ids: {RIGHT}")
    mask = arguments.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        raise ValueError(
            f"{name} was called with an attention_mask {tuple(mask.shape)}: {RIGHT} (documents say "
            f"there what it said); {ON_ONE_PROCESS}"
        )


def refuse_unsupported(layer: str, kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments of an attention layer that no kernel of ours supports."""
    for name, feature in UNSUPPORTED.items():
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise NotImplementedError(f"{layer} asks for {feature}, which WallFacer lacks")


def refuse_layer(module: nn.Module, query: Tensor, key: Tensor, kwargs: Mapping[str, Any]) -> None:
    layer, config = type(module).__name__, getattr(module, "config", None)
    refuse_unsupported(layer, kwargs)
    bias = kwargs.get("position_bias")
    if bias is not None and bias.dim() != 2:
        raise NotImplementedError(f"{layer} asks for an attention bias, which WallFacer lacks")
    if kwargs.get("cu_seq_lens_q") is not None:
        raise ValueError(
            "cu_seq_lens_q are not used here: pass cu_seqlens, global and as host integers"
        )
    if getattr(config, "output_attentions", False):
        raise NotImplementedError(f"{layer} asks for {UNSUPPORTED['output_attentions']}")
    if getattr(module, "is_cross_attention", False):
        raise NotImplementedError(f"{layer} asks for cross attention, which WallFacer lacks here")
    if query.shape[2] != key.shape[2] and getattr(module, IN_STACK, None) != "cross":
        raise NotImplementedError(
            f"{layer} has {query.shape[2]} queries and {key.shape[2]} keys on this rank: a KV "
            f"cache is not supported; {ON_ONE_PROCESS}"
        )
