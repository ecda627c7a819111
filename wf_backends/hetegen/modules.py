"""Which modules of a model are split, and what stands in for them meanwhile."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

from torch import Tensor, nn

from wf_backends.hetegen.jobs import Linear
from wf_backends.hetegen.runner import HostWeight, Runner

MIN_ROWS = 16  # a linear with fewer is not worth a split: routers, heads of few classes
EXPERT = re.compile(r"(.*\.experts\.\d+)\.")
SIZES = ("in_features", "out_features", "nf", "nx")  # what models ask a linear for


@dataclass(frozen=True, slots=True)
class Found:
    """A module whose weight is split."""

    module: nn.Module
    linear: Linear
    weight: HostWeight


class SplitLinear(nn.Module):
    """Stands in for a linear: the same parameters under the same names."""

    def __init__(self, original: nn.Module, multiply: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.bias = original.weight, original.bias
        self.multiply = multiply
        for name in SIZES:
            if hasattr(original, name):
                setattr(self, name, getattr(original, name))

    def forward(self, x: Tensor) -> Tensor:
        out = self.multiply(x)
        return out if self.bias is None else out.add_(cast(Tensor, self.bias))


class HostEmbedding(nn.Module):
    """Stands in for an embedding whose weight is a split linear's: rows are read where they lie."""

    def __init__(self, original: nn.Embedding, lookup: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = original.weight
        self.num_embeddings, self.embedding_dim = original.num_embeddings, original.embedding_dim
        self.padding_idx, self.lookup = original.padding_idx, lookup

    def forward(self, ids: Tensor) -> Tensor:
        return self.lookup(ids)


def find_linears(model: nn.Module) -> list[Found]:
    """The linears that can be split, in the model's order.

    A weight that other modules read as well is split only where those are embeddings.
    """
    users = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    tables = Counter(id(m.weight) for m in model.modules() if type(m) is nn.Embedding)
    names = [(n, m) for n, m in model.named_modules() if is_linear(m)]
    experts = {match[1] for name, _ in names if (match := EXPERT.match(name))}
    found = []
    for name, module in names:
        weight = cast(Tensor, module.weight)
        if users[id(weight)] - tables[id(weight)] == 1:
            expert = match[1] if (match := EXPERT.match(name)) else ""
            dim = 0 if isinstance(module, nn.Linear) else 1
            sizes = weight.shape[dim], weight.shape[1 - dim]
            routed = routed_share(model, expert, experts) if expert else 1.0
            linear = Linear(name, *sizes, weight.itemsize, expert, routed)
            found.append(Found(module, linear, HostWeight(weight.detach(), dim)))
    return found


def is_linear(module: nn.Module) -> bool:
    """Whether it is an nn.Linear or transformers' Conv1D, and has rows enough."""
    if type(module) is nn.Linear:
        return module.out_features >= MIN_ROWS
    return type(module).__name__ == "Conv1D" and cast(int, getattr(module, "nf", 0)) >= MIN_ROWS


def routed_share(model: nn.Module, expert: str, experts: set[str]) -> float:
    """The share of the tokens that an expert gets: those of a token over those of its layer."""
    beside = expert.rpartition(".")[0]
    count = sum(other.rpartition(".")[0] == beside for other in experts)
    chosen = getattr(getattr(model, "config", None), "num_experts_per_tok", 2)
    return min(1.0, chosen / count)


def stand_in(model: nn.Module, found: list[Found], runner: Runner) -> Callable[[], None]:
    """Put split linears, and embeddings with their weights, in place; what puts all back."""
    replaced: dict[nn.Module, nn.Module] = {
        f.module: SplitLinear(f.module, partial(runner.linear, i)) for i, f in enumerate(found)
    }
    split = {id(f.module.weight) for f in found}
    for module in model.modules():
        if type(module) is nn.Embedding and id(module.weight) in split:
            replaced[module] = HostEmbedding(module, partial(runner.lookup, module.weight.detach()))
    places = [
        (parent, name, child, replaced[child])
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child in replaced
    ]
    for parent, name, original, other in places:
        other.train(original.training)
        parent._modules[name] = other

    def put_back() -> None:
        for parent, name, original, _ in places:
            parent._modules[name] = original

    return put_back
