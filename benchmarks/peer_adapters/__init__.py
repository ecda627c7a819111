"""One adapter per peer, each a module with `schemes(place)`; one protocol: `Scheme`.

An adapter may fail to import, a scheme to be made or to run: `peers.py` reports it and goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Place:
    """This rank, and the whole sequence."""

    rank: int
    size: int
    tokens: int

    def contiguous(self) -> Tensor:
        """(s,) positions of this rank's rows: one range."""
        return torch.arange(self.tokens).chunk(self.size)[self.rank]

    def zigzag(self) -> Tensor:
        """(s,) positions of this rank's rows: chunks r and 2P-1-r."""
        chunks = torch.arange(self.tokens).chunk(2 * self.size)
        return torch.cat([chunks[self.rank], chunks[2 * self.size - 1 - self.rank]])


@dataclass(frozen=True, slots=True)
class Scheme:
    """Causal attention over a sequence that is spread in the scheme's own layout."""

    positions: Tensor
    """(s,) int64: the global positions of this rank's rows, in the scheme's order."""
    attend: Attend
    """q, k, v (1, s, h, d), this rank's rows -> out (1, s, h, d), differentiable."""
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered around forward and backward."""
    reported: Callable[[], int] | None = None
    """Bytes sent since the last call, by the scheme's own count."""


Make = Callable[[], Scheme]
STAND_IN = Path(__file__).parents[1] / "flash_attn_stand_in"

ADAPTERS: Mapping[str, str] = MappingProxyType(
    {
        "ours": "ours",
        "DeepSpeed": "deepspeed_ulysses",
        "yunchang": "yunchang_usp",
        "ring-flash-attn": "ring_flash",
        "torch": "torch_context_parallel",
        "ring-attention-pytorch": "ring_pytorch",
    }
)
"""Packages in the order of the table, and the module here that knows each."""


def schemes_of(package: str, place: Place) -> Mapping[str, Make]:
    """The schemes of one package by name, ready to be made.

    Raises:
        ImportError, or whatever the package raises on being imported.
    """
    return import_module(f"peer_adapters.{ADAPTERS[package]}").schemes(place)


def lend_flash_attn() -> None:
    """Let `import flash_attn` find the stand-in, unless the real one is installed."""
    if find_spec("flash_attn") is None:
        sys.path.append(str(STAND_IN))
