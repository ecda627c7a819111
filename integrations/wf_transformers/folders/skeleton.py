"""Builds a model of a folder on fake tensors: operators and shapes without memory."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import __version__
from transformers.models.auto.auto_factory import _get_model_class
from transformers.models.auto.modeling_auto import AutoModel, AutoModelForCausalLM

from wf_backends._validation import one_of
from wf_transformers.folders.layers import to_fake_tensors
from wf_transformers.folders.shape import (
    DTYPE,
    has_causal_model,
    no_init_weights,  # pyright: ignore[reportAttributeAccessIssue]
    read_config,
    refused_by_name,
)

ATTENTIONS = ("sdpa", "eager")
SIDES = ("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers")
SHARED_CACHES = "num_kv_shared_layers"  # the last layers of Gemma 3n: they read keys of others
LEARNED_POSITIONS = ("wpe", "embed_positions", "position_embeddings", "positions_embed")
COMPUTED_POSITIONS = ("embed_positions", "pos_encoding")  # tensors of GPT-J, CodeGen; of CTRL


def skeleton(
    folder: Path, seqlen: int, batch: int, attention: str, layers: int | None
) -> tuple[nn.Module, dict[str, Any]]:
    """The model in evaluation mode, and the keyword arguments of a prefill without a cache.

    Of a model with several parts (LLaVA, CLIP) it is the one for text. An encoder and a decoder
    both get `seqlen` tokens.

    Args:
        folder: with config.json; weights are not read.
        attention: "sdpa" or "eager".
        layers: how many layers to build; 0: all; None: the first ones, up to the first of the last
            kind of layer.
    """
    one_of("--attention", attention, ATTENTIONS)
    whole_config = read_config(folder)
    advice = "build the model in Python and call wf_backends.autochunk.memory_profiles"
    with refused_by_name(folder):
        text_config = whole_config.get_text_config()
        # A text config may have no model of its own (Mllama's): that of the whole is for text.
        config = next(filter(has_causal_model, (text_config, whole_config)), text_config)
        is_decoder = has_causal_model(config) and not config.is_encoder_decoder
        auto_class = AutoModelForCausalLM if is_decoder else AutoModel
        kind = f"(model_type {config.model_type!r}, transformers {__version__})"
        if type(config) not in auto_class._model_mapping:
            name = type(config).__name__
            raise ValueError(f"{auto_class.__name__} has no class for {name} {kind}; {advice}")
        model_class: Any = _get_model_class(config, auto_class._model_mapping)
        _check_class(model_class, attention)
    if layers:
        keep_layers(text_config, layers)
    dtype = getattr(text_config, DTYPE) or getattr(whole_config, DTYPE) or torch.float32
    advice = f", while {model_class.__name__} {kind} was built: complete config.json, or {advice}"
    with refused_by_name(folder, advice), torch.device("meta"), no_init_weights():
        # not on fake tensors, which code that converts modules while it builds them cannot swap
        kwargs = {"attn_implementation": attention, DTYPE: dtype}
        model = auto_class.from_config(config, **kwargs)
        model.tie_weights()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    to_fake_tensors(model, mode)
    with mode:
        check_positions(f"--seqlen {seqlen}", model, seqlen)
        inputs: dict[str, Any] = {"input_ids": torch.zeros(batch, seqlen, dtype=torch.long)}
    if layers is None:
        return skeleton(folder, seqlen, batch, attention, layers_of_all_kinds(model))
    parameters = inspect.signature(model.forward).parameters
    names = {*parameters}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        names |= {"use_cache"} & {*vars(model.config)}  # Granite's passes it on
    prefill = {"use_cache": False, "logits_to_keep": 1}  # only the last token's logits
    options = prefill | {"decoder_input_ids": inputs["input_ids"].clone()}
    return model.eval(), inputs | {name: x for name, x in options.items() if name in names}


def keep_layers(config: Any, layers: int) -> None:
    """Keep the first layers in a config, also in its lists of the kinds of all layers (Zamba's)."""
    if not isinstance(count := getattr(config, "num_hidden_layers", None), int):
        raise NotImplementedError(f"{type(config).__name__} has no number of layers to reduce")
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(config, name, value[:layers])
    own_name = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    for name in {own_name, *SIDES} & vars(config).keys():
        setattr(config, name, min(layers, getattr(config, name)))
    if shared := getattr(config, SHARED_CACHES, 0):
        setattr(config, SHARED_CACHES, max(0, layers - (count - shared)))


def layers_of_all_kinds(model: Any) -> int:
    """How many of the first layers have all kinds of layers among them; at least two. 0, which is
    all, if the config does not say how many there are."""
    count, num_layers = 2, getattr(model.config, "num_hidden_layers", None)
    if num_layers is None:
        return 0
    for stack in model.modules():
        if isinstance(stack, nn.ModuleList) and len(stack) == num_layers:
            kinds = list(map(_kind, stack))
            count = max(count, *(kinds.index(kind) + 1 for kind in kinds))
    return count


def _kind(layer: nn.Module) -> str:
    """What tells a layer from others: its modules, and their options, such as a window."""
    options = [
        {name: x for name, x in vars(module).items() if x is None or isinstance(x, bool | str)}
        for module in layer.modules()
    ]
    return f"{layer} {options}"


def _check_class(model_class: Any, attention: str) -> None:
    """Refuse a class that does not take tokens, or has eager attention alone."""
    name, inputs = model_class.__name__, model_class.main_input_name
    if inputs != "input_ids":
        raise ValueError(f"{name} takes {inputs}; only models of tokens are supported")
    if attention == "sdpa" and not model_class._supports_sdpa:
        raise ValueError(f"{name} has no attention {attention!r}; give --attention eager")


def check_positions(name: str, model: nn.Module, tokens: int) -> None:
    """Refuse more tokens than the model has positions: on fake tensors it would run."""
    config: Any = model.config
    if getattr(config, "position_embedding_type", None) == "rotary":  # ESM has a table, unused
        return
    for path, module in model.named_modules():
        if rows := _positions(path, module):  # OPT's table has two more than it has positions
            limit = min(rows, getattr(config, "max_position_embeddings", rows))
            if tokens > limit:
                raise ValueError(
                    f"{name}: {type(model).__name__} has {limit} positions "
                    f"({path}); give at most so many tokens"
                )


def _positions(path: str, module: nn.Module) -> int | None:
    """The rows of a module's table of positions; None if it has no table."""
    if isinstance(module, nn.Embedding):
        return module.num_embeddings if path.rpartition(".")[2] in LEARNED_POSITIONS else None
    tables = (getattr(module, name, None) for name in COMPUTED_POSITIONS)
    return next((len(table) for table in tables if isinstance(table, torch.Tensor)), None)
