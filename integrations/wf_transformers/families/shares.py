"""What a row of the table of mixers says, and what one rank runs of such a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
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


class Mixer(ABC):
    """A kind of layer. What most have in common is here."""

    summed: tuple[str, ...] = ()
    """Modules whose results are sums over all channels."""
    whole: tuple[str, ...] = ()
    """Parameters that every rank uses whole, on all rows, for its own channels."""

    @abstractmethod
    def share(self, layer: Any, rank: int, size: int) -> Share:
        """What rank `rank` of `size` runs; NotImplementedError if channels do not divide."""

    def project(self, layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Hidden states -> the features that are exchanged, and what stays with its tokens."""
        return layer.in_proj(hidden), None

    def finish(self, layer: Any, y: Tensor, kept: Any) -> Tensor:
        """The result, and what stayed -> hidden states."""
        return layer.out_proj(y)

    def instead(self, layer: Any, share: Share) -> dict[str, nn.Module]:
        """What is in the place of modules of the layer where its code runs on a share."""
        return {"in_proj": Keep(), "out_proj": Keep()}

    def words(self, layer: Any, x: Tensor) -> dict[str, Any]:
        """What a layer on a share is called with beside a document's (b, S, c)."""
        return {}


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
