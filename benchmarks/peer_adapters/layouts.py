"""Rows of a rank, for peers that have no function that says which they are."""

from __future__ import annotations

import torch
from torch import Tensor

from peer_adapters import Place


def contiguous(place: Place) -> Tensor:
    """(s,) positions: one range."""
    return torch.arange(place.tokens).chunk(place.size)[place.rank]


def zigzag(place: Place) -> Tensor:
    """(s,) positions: chunks r and 2P-1-r."""
    chunks = torch.arange(place.tokens).chunk(2 * place.size)
    return torch.cat([chunks[place.rank], chunks[2 * place.size - 1 - place.rank]])
