"""Finds the weights of a model that are split, and checks the inputs of their products."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from wf_backends._compile import refuse_transforms
from wf_backends.hetegen.weights import Linear

MIN_ROWS = 16  # smaller linears are not worth a split: routers, heads of few classes
FALCON_LINEAR = "FalconLinear"  # a subclass of nn.Linear in transformers
EXPERT_NAME = re.compile(r"((?:.*\.)?experts)\.(?:expert_)?\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class HostWeight:
    """A split weight in host memory.

    Attributes:
        parameter: the nn.Parameter; it may hold all experts of a layer.
        linear: the same weight in a plan.
        tensor: the parameter's memory, or that of one expert in it.
        dim: the dimension of output features: 0 for (rows, columns) as in nn.Linear, 1 for
            (columns, rows) as in transformers' Conv1D.
        version: how often the tensor had been written to when it was split.
    """

    parameter: Any
    linear: Linear
    tensor: Tensor
    dim: int
    version: int

    def rows(self, start: int, stop: int) -> Tensor:
        """A view of the rows [start, stop)."""
        return self.tensor.narrow(self.dim, start, stop - start)

    def transposed(self, rows: Tensor) -> Tensor:
        """Some rows of the weight, or a copy of them, as (columns, rows)."""
        return rows.t() if self.dim == 0 else rows

    def refuse_gradient(self, x: Tensor) -> None:
        """Refuse an input or a weight that needs a gradient, and torch.func's transforms."""
        refuse_transforms("a split linear", "give samples as a batch", input=x)
        if torch.is_grad_enabled() and (x.requires_grad or self.parameter.requires_grad):
            raise NotImplementedError(
                "a split linear has no gradient: call the model under torch.no_grad(), and merge "
                "adapters before dispatch_model"
            )

    def checked_input(self, x: Tensor, device: torch.device) -> Tensor:
        """The input of a product, cast as autocast would cast it.

        Raises:
            NotImplementedError: if autocast asks for another dtype than the weight's.
            ValueError: for an input of another width, dtype or device, or if the weight was written
                to since it was split.
        """
        linear, tensor = self.linear, self.tensor
        if x.device != device:
            raise ValueError(f"{linear.name} takes an input on {device}, got {x.device}")
        x = _autocast(x, tensor.dtype)
        if x.shape[-1:] != (linear.columns,) or x.dtype != tensor.dtype:
            raise ValueError(
                f"{linear.name} takes an input (..., {linear.columns}) of {tensor.dtype}, "
                f"got {tuple(x.shape)} of {x.dtype}"
            )
        if _version(tensor) != self.version:
            raise ValueError(
                f"{linear.name}.weight was changed while the model is split, and the accelerator "
                "has copies of the old one: call handle.remove(), then dispatch_model again"
            )
        return x


def find_weights(model: nn.Module) -> list[HostWeight]:
    """The weights that can be split, in the model's order.

    A weight that other modules use too is split only if these are embeddings, which only read it.

    Raises:
        ValueError: if there are none.
    """
    num_users = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    num_embeddings = Counter(id(m.weight) for m in embeddings if m.max_norm is None)
    candidates = list(_candidates(model))
    layers = {m[0]: m[1] for name, *_ in candidates if (m := EXPERT_NAME.match(name))}
    layer_experts = Counter(layers.values())  # layer -> number of its experts
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", config)  # of a model of texts and images
    experts_per_token = getattr(config, "num_experts_per_tok", 2)
    weights: list[HostWeight] = []
    for name, parameter, tensor, dim in candidates:
        if tensor.numel() and num_users[id(parameter)] - num_embeddings[id(parameter)] == 1:
            expert, routed = "", 1.0
            if match := EXPERT_NAME.match(name):
                expert = match[0]
                routed = min(1.0, experts_per_token / layer_experts[layers[expert]])
            rows, columns = tensor.shape[dim], tensor.shape[1 - dim]
            linear = Linear(name, rows, columns, tensor.itemsize, expert, routed)
            weights.append(HostWeight(parameter, linear, tensor, dim, _version(tensor)))
    if not weights:
        raise ValueError(
            f"{type(model).__name__} has nothing to split: no nn.Linear or Conv1D of its own "
            f"with {MIN_ROWS} output features or more"
        )
    return weights


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Tensor, int]]:
    """(name, parameter, its weight matrix, the matrix's dimension of output features) of each."""
    for name, module in cast(Iterable[tuple[str, Any]], model.named_modules()):
        if is_linear(module):
            dim = 1 if type(module).__name__ == "Conv1D" else 0
            yield name, module.weight, module.weight.detach(), dim
        stacks = expert_stacks(module)
        num_experts = len(next(iter(stacks.values()), ()))  # of the first stack
        for expert in range(num_experts):
            for key, stack in stacks.items():
                dim = 1 if module.is_transposed else 0
                yield f"{name}.{expert}.{key}", stack, stack.detach()[expert], dim


def expert_stacks(module: Any) -> dict[str, nn.Parameter]:
    """The weights of a layer's experts by name, each of all experts, as transformers 5 has them.

    (experts, rows, columns), or with `is_transposed` (experts, columns, rows). Empty for a module
    that is no such layer.
    """
    if not isinstance(getattr(module, "is_transposed", None), bool):
        return {}
    parameters = module.named_parameters(recurse=False)
    return {key: p for key, p in parameters if p.dim() == 3 and type(p) is nn.Parameter}


def is_linear(module: Any) -> bool:
    """Whether it is an nn.Linear, or transformers' Conv1D or FalconLinear, with enough rows and a
    plain weight.

    The weight must be an nn.Parameter itself: rows of a quantized or sharded one may be no views.
    """
    if type(module) is nn.Linear or type(module).__name__ == FALCON_LINEAR:
        rows = module.out_features
    else:
        rows = getattr(module, "nf", 0) if type(module).__name__ == "Conv1D" else 0
    return rows >= MIN_ROWS and type(module.weight) is nn.Parameter


def _autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The input as autocast would cast it for a product with weights of `dtype`.

    Autocast leaves float64 alone.
    """
    device_type = x.device.type
    if not torch.is_autocast_enabled(device_type) or torch.float64 in (x.dtype, dtype):
        return x
    if torch.get_autocast_dtype(device_type) != dtype:
        raise NotImplementedError(
            f"a split linear of {dtype} is not computed in another type, and autocast asks for "
            f"{torch.get_autocast_dtype(device_type)}: call without autocast, or convert the model "
            "before dispatch_model"
        )
    return x.to(dtype)


def _version(tensor: Tensor) -> int:
    """How often the tensor was written to; 0 for inference tensors, which do not count it."""
    return 0 if tensor.is_inference() else tensor._version
