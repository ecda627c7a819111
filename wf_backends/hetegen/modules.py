"""Which linears of a model are split, and what they take."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wf_backends._compile import refuse_transforms
from wf_backends.weights import Linear

MIN_ROWS = 16  # a linear with fewer is not worth a split: routers, heads of few classes
EXPERT = re.compile(r"((?:.*\.)?experts)\.\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class HostWeight:
    """A weight that is split, in host memory, with its output features along `dim`.

    (rows, columns) with dim 0, as nn.Linear has it, or (columns, rows) with dim 1, as
    transformers' Conv1D.

    Attributes:
        tensor: the parameter's memory, or that of one expert in it.
        version: how often it had been written to.
    """

    parameter: Any
    linear: Linear
    tensor: Tensor
    dim: int
    version: int

    def rows(self, start: int, stop: int) -> Tensor:
        """A view of some rows."""
        return self.tensor.narrow(self.dim, start, stop - start)

    def multiply(self, rows: Tensor, x: Tensor, out: Tensor) -> None:
        """x (n, columns) times some rows, into out (n, rows)."""
        torch.mm(x, rows.t() if self.dim == 0 else rows, out=out)

    def look_up(self, ids: Tensor, out: Tensor) -> None:
        """Rows `ids` (...) into out (..., columns)."""
        out.copy_(F.embedding(ids, self.tensor))

    def refuse_gradient(self, x: Tensor) -> None:
        """Refuse an input or a weight whose gradient is asked for, in whatever way."""
        refuse_transforms("a split linear", "give samples as a batch", input=x)
        if torch.is_grad_enabled() and (x.requires_grad or self.parameter.requires_grad):
            raise NotImplementedError(
                "a split linear has no gradient: call the model under torch.no_grad()"
            )

    def checked(self, x: Tensor, where: torch.device) -> Tensor:
        """The input as autocast has it, if the lanes can multiply it, with weights as they were.

        Raises:
            NotImplementedError: where autocast asks for another type than the weights'.
            ValueError: for an input that does not fit, or weights that were written to.
        """
        linear, tensor = self.linear, self.tensor
        if x.device != where:
            raise ValueError(f"{linear.name} takes an input on {where}, got {x.device}")
        x = _as_autocast(x, tensor.dtype)
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

    One that other modules read as well is split only where those are tables.

    Raises:
        ValueError: if there are none.
    """
    users = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    embeddings = [m for m in model.modules() if type(m) is nn.Embedding]
    tables = Counter(id(m.weight) for m in embeddings if m.max_norm is None)  # they only read it
    candidates = [*_candidates(model)]
    experts = {match[0]: match[1] for name, *_ in candidates if (match := EXPERT.match(name))}
    beside = Counter(experts.values())  # how many experts a layer has
    chosen = getattr(getattr(model, "config", None), "num_experts_per_tok", 2)
    found = []
    for name, parameter, tensor, dim in candidates:
        if tensor.numel() and users[id(parameter)] - tables[id(parameter)] == 1:
            expert = match[0] if (match := EXPERT.match(name)) else ""
            routed = min(1.0, chosen / beside[experts[expert]]) if expert else 1.0
            sizes = tensor.shape[dim], tensor.shape[1 - dim]
            linear = Linear(name, *sizes, tensor.itemsize, expert, routed)
            found.append(HostWeight(parameter, linear, tensor, dim, _version(tensor)))
    if not found:
        raise ValueError(
            f"{type(model).__name__} has nothing to split: no nn.Linear or Conv1D of its own "
            f"with {MIN_ROWS} output features or more"
        )
    return found


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Tensor, int]]:
    """(name, parameter, what of it a product takes, its dimension of output features) of each."""
    for name, module in cast(Iterable[tuple[str, Any]], model.named_modules()):
        if is_linear(module):
            dim = int(type(module) is not nn.Linear)
            yield name, module.weight, module.weight.detach(), dim
        stacks = stacks_of_experts(module)
        for expert in range(len(next(iter(stacks.values()), ()))):
            for key, stack in stacks.items():
                dim = int(module.is_transposed)
                yield f"{name}.{expert}.{key}", stack, stack.detach()[expert], dim


def stacks_of_experts(module: Any) -> dict[str, nn.Parameter]:
    """The weights of all experts of a layer, as transformers 5 keeps them; {} of another layer.

    (experts, rows, columns), or where the layer says `is_transposed` (experts, columns, rows).
    """
    if not isinstance(getattr(module, "is_transposed", None), bool):
        return {}
    own = module.named_parameters(recurse=False)
    return {key: p for key, p in own if p.dim() == 3 and type(p) is nn.Parameter}


def is_linear(module: Any) -> bool:
    """Whether it is an nn.Linear or transformers' Conv1D with rows enough, and a plain weight.

    Of a quantized or sharded one, rows may not be views.
    """
    if type(module) is nn.Linear:
        rows = module.out_features
    else:
        rows = getattr(module, "nf", 0) if type(module).__name__ == "Conv1D" else 0
    return rows >= MIN_ROWS and type(module.weight) is nn.Parameter


def _as_autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The input as autocast, where it is on, would give it to a product with weights of `dtype`.

    It leaves float64 alone.
    """
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or torch.float64 in (x.dtype, dtype):
        return x
    if torch.get_autocast_dtype(kind) != dtype:
        raise NotImplementedError(
            f"a split linear of {dtype} is not computed in another type, and autocast asks for "
            f"{torch.get_autocast_dtype(kind)}: call without autocast, or convert the model before "
            "dispatch_model"
        )
    return x.to(dtype)


def _version(tensor: Tensor) -> int:
    """How often it was written to; 0 of one that does not count."""
    return 0 if tensor.is_inference() else tensor._version
