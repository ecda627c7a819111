"""Which rows of a whole tensor a rank's part holds, and how far the two are from each other."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from wf_backends import SequenceParallel
from wf_backends.schedule import padding_multiple
from wf_transformers.calls import tokens_of

LESS = (0, 1)  # rows than tokens: the last one predicts nothing, so some leave it out
SLOPES = tuple(sqrt(prime) for prime in (2, 3, 5, 7, 11, 13))


class Rows:
    """The rows of one rank of a batch: (b, S) tokens, or something that the model cuts itself.

    Args:
        sp: the ranks that share the batch.
        batch: the whole of it.
        uneven: whether nothing is padded.
    """

    def __init__(
        self, sp: SequenceParallel, batch: Mapping[str, Any], uneven: bool = False
    ) -> None:
        self._sp, self._uneven = sp, uneven
        self.shape: tuple[int, ...] = ()
        """(b, S); () without tokens."""
        tokens = tokens_of(batch)
        if tokens is not None:
            self.shape = tuple(tokens.shape[:2])
            mask = batch.get("attention_mask")
            by_token = isinstance(mask, Tensor) and mask.shape == self.shape
            valid = mask != 0 if by_token else tokens.new_ones(self.shape, dtype=torch.bool)
            self._positions = self._padded(self.shape[1], tokens.device, int(valid.any(0).sum()))
            self._valid = pad(valid, (0, self._sp.size * len(self._positions)))  # False at ours

    def unflatten(self, x: Tensor, whole: bool) -> Tensor:
        """(b, S, ...) of what layers that route tokens make of it, (b S, ...)."""
        if not self.shape or not x.dim():
            return x
        samples, seqlen = self.shape[0], self.shape[1] if whole else len(self._positions)
        same = x.shape[0] == samples * seqlen
        return x.unflatten(0, (samples, seqlen)) if same else x

    def pair(self, part: Tensor, whole: Tensor) -> tuple[Tensor, Tensor, bool] | None:
        """The same rows of both, 0 at padding, and whether `part` was cut; None if unknown."""
        if part.dim() != whole.dim():
            return None
        dims = [dim for dim in range(whole.dim()) if part.shape[dim] != whole.shape[dim]]
        valid = self._valid_of(whole, dims[0] if dims else 1)
        if not dims:
            return part.where(valid, 0), whole.where(valid, 0), False
        count, seqlen = part.shape[dims[0]], whole.shape[dims[0]]
        rows = self._find(count, seqlen, whole.device) if len(dims) == 1 else None
        if rows is None:
            return None
        inside = (rows < seqlen).nonzero().flatten()
        part, whole = part.index_select(dims[0], inside), whole.index_select(dims[0], rows[inside])
        if valid.dim():
            valid = valid.index_select(dims[0], rows[inside])
        return part.where(valid, 0), whole.where(valid, 0), True

    def _find(self, count: int, seqlen: int, device: torch.device) -> Tensor | None:
        """Positions of a part's `count` rows in a whole of `seqlen`."""
        tokens = self.shape and self.shape[1] - seqlen in LESS
        found = self._positions if tokens else self._padded(seqlen, device)
        return found if len(found) == count else None

    def _padded(self, seqlen: int, device: torch.device, valid: int = 0) -> Tensor:
        """Positions of this rank's rows of `seqlen`; padding behind `valid` ones is a document."""
        if self._uneven and seqlen >= self._sp.size:
            return self._sp.positions(seqlen, device, (0, seqlen))
        multiple = padding_multiple(self._sp.config.layout, self._sp.size)
        padded = -(-seqlen // multiple) * multiple
        return self._sp.positions(padded, device, (*sorted({0, valid, padded}),))

    def _valid_of(self, whole: Tensor, dim: int = 1) -> Tensor:
        """(b, 1, ..., S, 1, ...) bool, the tokens in `dim`: False at padding; True without any.

        Samples are in the first dimension, or in the one before the tokens: (3, b, S, ...).
        """
        for samples in (0, dim - 1) if self.shape and whole.dim() > 1 else ():
            count, seqlen = whole.shape[samples], whole.shape[dim]
            if count == self.shape[0] and self.shape[1] - seqlen in LESS:
                sizes = [1] * whole.dim()
                sizes[samples], sizes[dim] = count, seqlen
                return self._valid[:, :seqlen].reshape(sizes)
        return torch.ones((), dtype=torch.bool, device=whole.device)

    def weights(self, x: Tensor, whole: bool) -> Tensor:
        """What the elements of an output count in a loss made for it; over the ranks, once each."""
        if whole or not self.shape or x.shape[:2] != (self.shape[0], len(self._positions)):
            return _wave(x) * self._valid_of(x) / (1 if whole else self._sp.size)
        valid = self._valid[:, self._positions].view(*x.shape[:2], *[1] * (x.dim() - 2))
        return _wave(x, self._positions) * valid


def _wave(x: Tensor, rows: Tensor | None = None) -> Tensor:
    """cos(1 + sum over dims of slope x index): weights that any rank can tell for its rows."""
    phase = torch.ones((), dtype=torch.float64, device=x.device)
    for dim, (count, slope) in enumerate(zip(x.shape, SLOPES, strict=False)):
        index = torch.arange(count, device=x.device) if dim != 1 or rows is None else rows
        phase = phase + slope * index.view(-1, *[1] * (x.dim() - dim - 1))
    return phase.cos().to(x.dtype)
