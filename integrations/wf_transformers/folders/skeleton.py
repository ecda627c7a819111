"""Builds a model of a folder on fake tensors: operators and shapes without memory."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
)

from wf_transformers.folders.shape import read_config, refused_by_name

ATTENTIONS = ("sdpa", "eager")


def skeleton(
    folder: Path, seqlen: int, batch: int, attention: str, layers: int
) -> tuple[nn.Module, dict[str, Any]]:
    """The model in evaluation mode, and the keyword arguments of a prefill without a cache.

    Args:
        folder: with config.json; weights are not read.
        attention: "sdpa" or "eager".
        layers: how many layers to build; 0: all.

    Raises:
        ValueError: for an unusable folder or attention, or a model that does not take tokens.
    """
    if attention not in ATTENTIONS:
        raise ValueError(f"--attention must be one of {list(ATTENTIONS)}, got {attention!r}")
    config = read_config(folder)
    if layers:
        config.num_hidden_layers = min(layers, config.num_hidden_layers)
    auto_class = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel
    dtype = config.torch_dtype or torch.float32
    with FakeTensorMode():
        with refused_by_name(folder):
            model = auto_class.from_config(config, attn_implementation=attention, torch_dtype=dtype)
        if model.main_input_name != "input_ids":
            raise ValueError(
                f"--model {folder}: {type(model).__name__} takes {model.main_input_name}; only "
                f"models of tokens are supported"
            )
        inputs: dict[str, Any] = {"input_ids": torch.zeros(batch, seqlen, dtype=torch.long)}
    names = inspect.signature(model.forward).parameters
    prefill = {"use_cache": False, "logits_to_keep": 1}  # only the last token's logits
    return model.eval(), inputs | {name: x for name, x in prefill.items() if name in names}
