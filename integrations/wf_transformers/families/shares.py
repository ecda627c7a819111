"""The interface of a row in the table of mixers, and the share of a layer that one rank runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Cuts = dict[str, tuple[int, Tensor]]  # parameter name -> (dim, indices of this rank along it)


@dataclass(frozen=True, slots=True)
class Share:
    """The share of a layer that one rank runs."""

    inputs: Tensor
    """(c,) indices of the projected features that the rank gets, in the order of the layer."""
    outputs: Tensor
    """(c',) indices of the features of the result that the rank computes."""
    parameters: Cuts
    attributes: dict[str, Any]
    """Sizes to set on the layer that runs the share, by dotted path."""


class Replacement(nn.Module):
    """Stands for a module of a layer that runs a share: returns `function` of its first argument,
    or that argument itself."""

    def __init__(self, function: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.function(x)


class Mixer(ABC):
    """A class of layers. b batch, s rows of this rank, S of a document, c features of a share."""

    summed_modules: tuple[str, ...] = ()
    """Modules whose results must be summed over the ranks: they contract all channels."""
    whole_parameters: tuple[str, ...] = ()
    """Parameters that every rank uses uncut."""
    has_own_cache = False
    """Whether the layer keeps its state in a cache of the model's own class."""

    @abstractmethod
    def share(self, layer: Any, rank: int, size: int) -> Share:
        """The share of rank `rank` of `size`; NotImplementedError if channels do not divide."""

    def project(self, layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """(b, s, width) -> the features that ranks exchange, and a tensor that is not exchanged."""
        return layer.in_proj(hidden), None

    def finish(self, layer: Any, y: Tensor, local: Any) -> Tensor:
        """From the result and the tensor that was not exchanged to hidden states (b, s, width)."""
        return layer.out_proj(y)

    def replacements(self, layer: Any, share: Share) -> dict[str, nn.Module]:
        """Replacements for modules of the layer when it runs on a share, by name."""
        return {"in_proj": Replacement(), "out_proj": Replacement()}

    def call_kwargs(self, layer: Any, x: Tensor) -> dict[str, Any]:
        """Keyword arguments for the layer on a share, besides a document's features (b, S, c)."""
        return {}


def divide(name: str, count: int, size: int) -> int:
    """count / size; NotImplementedError if it does not divide. `name` says what is counted."""
    if count % size:
        raise NotImplementedError(
            f"its {count} {name} cannot be shared by {size} ranks: take a sequence_parallel_size "
            "that divides them"
        )
    return count // size


def rank_range(name: str, count: int, rank: int, size: int) -> Tensor:
    """A rank's contiguous share of 0, ..., count - 1."""
    per_rank = divide(name, count, size)
    return torch.arange(rank * per_rank, (rank + 1) * per_rank)


def cut_first_dim(names: str, index: Tensor) -> Cuts:
    """Cuts that take `index` along dim 0 of each of these parameters, "a b c"."""
    return {name: (0, index) for name in names.split()}


def head_features(heads: Tensor, width: int) -> Tensor:
    """The indices of the features of `heads`, where every head has `width` features."""
    return (heads[:, None] * width + torch.arange(width)).flatten()
