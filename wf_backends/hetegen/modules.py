"""Which linears of a model are split."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wf_backends.hetegen.plan import Linear

MIN_ROWS = 16  # a linear with fewer is not worth a split: routers, heads of few classes
EXPERT = re.compile(r"(.*\.experts)\.\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class HostWeight:
    """A weight that is split, in host memory, with its output features along `dim`.

    (rows, columns) with dim 0, as nn.Linear has it, or (columns, rows) with dim 1, as
    transformers' Conv1D.
    """

    module: nn.Module
    linear: Linear
    tensor: Tensor
    dim: int

    def rows(self, start: int, stop: int) -> Tensor:
        """A view of some rows."""
        return self.tensor.narrow(self.dim, start, stop - start)

    def multiply(self, rows: Tensor, x: Tensor, out: Tensor) -> None:
        """x (n, columns) times some rows, into out (n, rows)."""
        torch.mm(x, rows.t() if self.dim == 0 else rows, out=out)

    def look_up(self, ids: Tensor, out: Tensor) -> None:
        """Rows `ids` (...) into out (..., columns)."""
        out.copy_(F.embedding(ids, self.tensor))


def find_weights(model: nn.Module) -> list[HostWeight]:
    """The weights that can be split, in the model's order.

    One that other modules read as well is split only where those are tables.

    Raises:
        ValueError: if there are none.
    """
    users = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    tables = Counter(id(m.weight) for m in model.modules() if is_table(m))
    linears: list[tuple[str, Any]] = [(n, m) for n, m in model.named_modules() if is_linear(m)]
    experts = {match[0]: match[1] for name, _ in linears if (match := EXPERT.match(name))}
    beside = Counter(experts.values())  # how many experts a layer has
    chosen = getattr(getattr(model, "config", None), "num_experts_per_tok", 2)
    found = []
    for name, module in linears:
        tensor = module.weight.detach()
        if tensor.numel() and users[id(module.weight)] - tables[id(module.weight)] == 1:
            expert = match[0] if (match := EXPERT.match(name)) else ""
            routed = min(1.0, chosen / beside[experts[expert]]) if expert else 1.0
            dim = 0 if type(module) is nn.Linear else 1
            sizes = tensor.shape[dim], tensor.shape[1 - dim]
            linear = Linear(name, *sizes, tensor.itemsize, expert, routed)
            found.append(HostWeight(module, linear, tensor, dim))
    if not found:
        raise ValueError(
            f"{type(model).__name__} has nothing to split: no nn.Linear or Conv1D of its own "
            f"with {MIN_ROWS} output features or more"
        )
    return found


def is_table(module: Any) -> bool:
    """Whether it is an nn.Embedding that only reads: one with max_norm rescales rows in place."""
    return type(module) is nn.Embedding and module.max_norm is None


def is_linear(module: Any) -> bool:
    """Whether it is an nn.Linear or transformers' Conv1D with rows enough, and a plain weight.

    Of a quantized or sharded one, rows may not be views.
    """
    if type(module) is nn.Linear:
        rows = module.out_features
    else:
        rows = getattr(module, "nf", 0) if type(module).__name__ == "Conv1D" else 0
    return rows >= MIN_ROWS and type(module.weight) is nn.Parameter
