"""Experts that transformers 5 keeps in one tensor, each with linears of its own, for HeteGen.

experts.gate_up_proj (experts, 2 I, width)  ->  experts.0.gate_up_proj.weight (2 I, width), ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel


def separate_experts(model: PreTrainedModel) -> bool:
    """Give every expert of a model linears of its own, in the memory that it has.

    A layer's own code runs expert by expert then, and finds a weight where it looked for it in the
    tensor of all. For inference: the state dict has other names. Layers whose weights are not as
    nn.Linear has them (gpt-oss) are left as they are.

    Returns:
        Whether there were any; in transformers 4 experts have linears of their own.
    """
    layers = [
        module for module in model.modules() if getattr(module, "is_transposed", None) is False
    ]
    for layer in layers:
        weights = {n: p for n, p in layer.named_parameters(recurse=False) if p.dim() == 3}
        for name, weight in weights.items():
            delattr(layer, name)
            linears = [_linear(of_one) for of_one in weight.detach()]
            setattr(layer, name, _ByExpert(linears))
        for expert in range(len(next(iter(weights.values())))):
            own = {name: getattr(layer, name).linears[expert] for name in weights}
            layer.add_module(str(expert), nn.ModuleDict(own))
    if layers:
        words: Any = model
        words.set_experts_implementation("eager")
    return bool(layers)


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(*weight.shape[::-1], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


class _ByExpert:
    """What a layer indexes by the number of an expert."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.linears = linears

    def __getitem__(self, expert: int | torch.Tensor) -> Tensor:
        return self.linears[int(expert)].weight
