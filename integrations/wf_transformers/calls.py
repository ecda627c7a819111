"""What a model whose tokens are on several ranks may be called with."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from wf_transformers.documents import NOT_CUT

ON_ONE_PROCESS = "generate on one process, with a model that is not connected to WallFacer"
RIGHT = "call the model with what sp.shard_batch and wf_transformers.forward_kwargs give"
LOSS = (
    "leave it out and take sp.loss (engine.wallfacer.loss) of the logits, or have forward_kwargs("
    "..., num_valid=) pass the labels of a ...ForCausalLM"
)
CACHES = ("past_key_values", "cache")
"""What models call their KV cache; the latter since transformers 5.24."""
# Arguments that mean another thing of one rank's part than of the whole sequence.
OF_THE_WHOLE = {
    **dict.fromkeys(CACHES, f"a KV cache cannot be spread; {ON_ONE_PROCESS}"),
    "logits_to_keep": f"would be counted in this rank's rows; leave it out ({ON_ONE_PROCESS})",
    "num_logits_to_keep": f"would be counted in this rank's rows; leave it out ({ON_ONE_PROCESS})",
    "output_router_logits": "the router's loss would be of this rank's tokens only; set it to "
    "False in the call and in the config",
}
FROM_CONFIG = ("output_router_logits",)
"""Which of these a model also takes from its config, where the call does not say."""
PARTIAL_STATES = (
    "output_hidden_states=True: they would be of this rank's tokens, beside whole logits; leave it "
    "out of the call and the config"
)
TOKENS = ("input_ids", "inputs_embeds")
MEDIA = ("pixel_values", "pixel_values_videos", "input_features", "input_values")
LABELS = ("labels", "start_positions", "end_positions", "next_sentence_label")


def parameter_names(model: nn.Module) -> list[str]:
    """Of the model's forward, in order."""
    return list(inspect.signature(model.forward).parameters)


def takes_any_keyword(model: nn.Module) -> bool:
    """Whether the model's forward has **kwargs that it passes on."""
    parameters = inspect.signature(model.forward).parameters.values()
    kept = (p for p in parameters if p.name != "deprecated_arguments")  # BLOOM's, which it refuses
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in kept)


def has_tokens(given: Mapping[str, Any]) -> bool:
    """Whether a call's arguments are tokens, not images or sounds (which encoders take whole)."""
    return any(given.get(key) is not None for key in TOKENS)


def rows_given(given: Mapping[str, Any]) -> int:
    """This rank's tokens among a call's arguments; 0 for images and sounds, which are whole."""
    for key in TOKENS:
        if isinstance(given.get(key), Tensor):
            return given[key].shape[1]
    return 0


def refuse_call(
    model: nn.Module, given: Mapping[str, Any], names: list[str], logits_are_whole: bool = False
) -> None:
    """Refuse a call that would take this rank's part for the whole sequence, or the reverse.

    Args:
        model: what is called.
        given: the arguments of the call by name.
        names: of the parameters of the model's forward.
        logits_are_whole: whether labels may be of all ranks, because logits are.

    Raises:
        NotImplementedError: for arguments that have no meaning for a part.
        ValueError: for a call without what `forward_kwargs` gives.
    """
    config = getattr(model, "config", None)
    for key, why in OF_THE_WHOLE.items():
        default = getattr(config, key, None) if key in FROM_CONFIG else None
        value = default if given.get(key) is None else given[key]
        if isinstance(value, Tensor) or value not in (None, 0):
            raise NotImplementedError(f"{key}: {why}")
    if model.training:
        _refuse_layerdrop(type(model).__name__, config)
    if has_tokens(given):
        if not logits_are_whole:
            _refuse_labels(type(model).__name__, given)
        _refuse_tokens(type(model).__name__, given, names)


def refuse_media(model: nn.Module, given: Mapping[str, Any]) -> None:
    """Refuse images or sounds beside tokens in a model of which nobody knows how to cut them.

    Where there are as many patches as a rank has tokens, attention cannot tell one from the other.

    Raises:
        NotImplementedError: naming the argument.
    """
    whole = next((key for key in MEDIA if given.get(key) is not None), None)
    if whole is not None and has_tokens(given):
        name = type(model).__name__
        raise NotImplementedError(f"{name} was called with {whole} beside tokens: {NOT_CUT}")


def refuse_inner_call(model: nn.Module, given: Mapping[str, Any], logits_are_whole: bool) -> None:
    """Refuse a call of a model inside another that would take a part for the whole.

    Raises:
        NotImplementedError: for hidden states of one rank beside logits of all.
        ValueError: for tokens without what `forward_kwargs` gives.
    """
    if logits_are_whole and _asks_hidden_states(model, given):
        raise NotImplementedError(PARTIAL_STATES)
    if has_tokens(given):
        _refuse_tokens(type(model).__name__, given, parameter_names(model))


def _asks_hidden_states(model: nn.Module, given: Mapping[str, Any]) -> bool:
    asked = given.get("output_hidden_states")
    own = getattr(getattr(model, "config", None), "output_hidden_states", False)
    return bool(own if asked is None else asked)


def _refuse_layerdrop(name: str, config: Any) -> None:
    words = vars(config) if config is not None else {}
    for key, value in words.items():
        if key.endswith("layerdrop") and isinstance(value, (int, float)) and value > 0:
            raise NotImplementedError(
                f"{name} is trained with {key}={value}: every rank would leave out other layers; "
                f"set {key} to 0 in the config"
            )


def _refuse_labels(name: str, given: Mapping[str, Any]) -> None:
    label = next((key for key in LABELS if given.get(key) is not None), None)
    if label is not None and given.get("shift_labels") is None:
        raise ValueError(
            f"{name} was called with {label}: its loss would be of this rank's tokens only, and "
            f"not of the next ones where these are on another rank; {LOSS}"
        )


def _refuse_tokens(name: str, given: Mapping[str, Any], names: list[str]) -> None:
    if "position_ids" in names and given.get("position_ids") is None:
        raise ValueError(f"{name} was called without position_ids: {RIGHT}")
    mask = given.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        raise ValueError(
            f"{name} was called with an attention_mask {tuple(mask.shape)}: {RIGHT} (documents say "
            f"there what it said); {ON_ONE_PROCESS}"
        )
