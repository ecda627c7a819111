"""What a row of the table of mixers says, and what one rank runs of such a layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

Cuts = dict[str, tuple[int, Tensor]]  # parameter -> (dim, what a rank has of it)
Attributes = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank runs of a layer."""

    inputs: Tensor
    """(c,) which of the projected features it takes, in the order that its code takes them."""
    outputs: Tensor
    """(c',) which features of the result it makes."""
    parameters: Cuts
    attributes: Attributes
    """Of the layer that runs: its sizes."""


class Keep(nn.Module):
    """The first argument, behind `zeros` features of 0."""

    def __init__(self, zeros: int = 0) -> None:
        super().__init__()
        self.zeros = zeros

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return pad(x, (self.zeros, 0)) if self.zeros else x


@dataclass(frozen=True, slots=True)
class Mixer:
    """A kind of layer."""

    share: Callable[[Any, int, int], Share]
    """(layer, rank, ranks) -> its share; NotImplementedError if channels do not divide."""
    project: Callable[[Any, Tensor], tuple[Tensor, Tensor | None]] = lambda layer, hidden: (
        layer.in_proj(hidden),
        None,
    )
    """(layer, hidden states) -> the features that are exchanged, and what stays with its tokens."""
    finish: Callable[[Any, Tensor, Tensor | None], Tensor] = lambda layer, y, _: layer.out_proj(y)
    """(layer, result, what stayed) -> hidden states."""
    instead: Callable[[Any, Share], dict[str, nn.Module]] = lambda layer, share: {
        "in_proj": Keep(),
        "out_proj": Keep(),
    }
    """Modules of the layer -> what is in their place where its code runs on a share."""
    summed: tuple[str, ...] = ()
    """Modules whose results are sums over all channels."""
    whole: tuple[str, ...] = ()
    """Parameters that every rank uses whole, on all rows, for its own channels."""
    run: Callable[[Any, Tensor], Any] = lambda layer, x: layer(x)
    """(layer on a share, (b, S, c)) -> (b, S, c'), or a tuple that starts with it."""


class Take(nn.Module):
    """The features `start` to `stop` of the first argument."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__()
        self.features = slice(start, stop)

    def forward(self, x: Tensor) -> Tensor:
        return x[..., self.features]


def divide(what: str, number: int, size: int) -> int:
    """number / size.

    Raises:
        NotImplementedError: if it does not divide.
    """
    if number % size:
        raise NotImplementedError(
            f"its {number} {what} cannot be shared by {size} ranks: take a sequence_parallel_size "
            "that divides them"
        )
    return number // size


def part(what: str, number: int, rank: int, size: int) -> Tensor:
    """A rank's share of 0, ..., number - 1."""
    each = divide(what, number, size)
    return torch.arange(rank * each, (rank + 1) * each)


def rows(names: tuple[str, ...], index: Tensor) -> Cuts:
    return {name: (0, index) for name in names}


def spans(index: Tensor, width: int) -> Tensor:
    """The features of heads of `width` features."""
    return (index[:, None] * width + torch.arange(width)).flatten()
