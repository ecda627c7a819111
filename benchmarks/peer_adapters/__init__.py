"""Adapters to other packages ("peers"): one module per package, with `schemes(setup)`.

The import of an adapter, its `schemes` or a run may fail; `peers.py` reports the error and goes on.
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
class Setup:
    """This rank, the number of ranks, and the tokens of the whole sequence."""

    rank: int
    size: int
    tokens: int

    def contiguous(self) -> Tensor:
        """Positions (s,) of this rank's rows: one range."""
        return torch.arange(self.tokens).chunk(self.size)[self.rank]

    def zigzag(self) -> Tensor:
        """Positions (s,) of this rank's rows: chunks r and 2P-1-r."""
        chunks = torch.arange(self.tokens).chunk(2 * self.size)
        return torch.cat([chunks[self.rank], chunks[2 * self.size - 1 - self.rank]])


@dataclass(frozen=True, slots=True)
class Scheme:
    """Causal attention over a sequence that is sharded by the scheme's own layout."""

    positions: Tensor
    """(s,) int64: the global positions of this rank's rows, in the scheme's order."""
    attend: Attend
    """q, k, v (1, s, h, d), this rank's rows -> out (1, s, h, d), differentiable."""
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    """Makes a context manager around forward and backward."""
    bytes_reported: Callable[[], int] | None = None
    """Bytes sent since the last call of this function, by the scheme's own count."""


MakeScheme = Callable[[], Scheme]
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
"""From the name of a package, in the order of the table, to its adapter module."""


def schemes_of(package: str, setup: Setup) -> Mapping[str, MakeScheme]:
    """Functions that make the schemes of one package, by name.

    Raises:
        ImportError, or what the import of the package raises.
    """
    return import_module(f"peer_adapters.{ADAPTERS[package]}").schemes(setup)


def add_flash_attn_stand_in() -> None:
    """Make `import flash_attn` find the stand-in if flash-attn is not installed."""
    if find_spec("flash_attn") is None:
        sys.path.append(str(STAND_IN))
