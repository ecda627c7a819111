"""What a model whose tokens are on several ranks may be called with."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
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
}
ROUTER_LOGITS = "output_router_logits"
HIDDEN_STATES = "output_hidden_states"
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


def by_name(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments, where `names` are those of the parameters."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


def asks_for(key: str, model: nn.Module, given: Mapping[str, Any]) -> bool:
    """Whether a call of a model asks for an output, or its config where the call does not say."""
    config, asked = getattr(model, "config", None), given.get(key)
    return bool(getattr(config, key, False) if asked is None else asked)


def tokens_of(given: Mapping[str, Any]) -> Tensor | None:
    """(b, S) ids or (b, S, width) embeddings among a call's arguments; None beside them stand
    images or sounds, which encoders take whole."""
    found = (given.get(key) for key in TOKENS)
    return next((x for x in found if isinstance(x, Tensor)), None)


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
    for key, why in OF_THE_WHOLE.items():
        value = given.get(key)
        if isinstance(value, Tensor) or value not in (None, 0):
            raise NotImplementedError(f"{key}: {why}")
    if asks_for(ROUTER_LOGITS, model, given):
        raise NotImplementedError(
            f"{ROUTER_LOGITS}: the router's loss would be of this rank's tokens only; set it to "
            "False in the call and in the config"
        )
    if model.training:
        _refuse_layerdrop(type(model).__name__, getattr(model, "config", None))
    if tokens_of(given) is not None:
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
    if whole is not None and tokens_of(given) is not None:
        name = type(model).__name__
        raise NotImplementedError(f"{name} was called with {whole} beside tokens: {NOT_CUT}")


def refuse_inner_call(model: nn.Module, given: Mapping[str, Any], logits_are_whole: bool) -> None:
    """Refuse a call of a model inside another that would take a part for the whole.

    Raises:
        NotImplementedError: for hidden states of one rank beside logits of all.
        ValueError: for tokens without what `forward_kwargs` gives.
    """
    if logits_are_whole and asks_for(HIDDEN_STATES, model, given):
        raise NotImplementedError(PARTIAL_STATES)
    if tokens_of(given) is not None:
        _refuse_tokens(type(model).__name__, given, parameter_names(model))


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
