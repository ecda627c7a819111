"""Matches the rows of a rank's part of a tensor with rows of the tensor on one rank.

Shapes: b batch, s rows of this rank, S rows of the whole sequence.
"""

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

MISSING_TOKENS = (0, 1)  # tensors may lack a row for the last token, which has no target
FREQUENCIES = tuple(sqrt(prime) for prime in (2, 3, 5, 7, 11, 13))


class RankRows:
    """The rows of one rank of a batch.

    Args:
        sp: the ranks that share the batch.
        batch: the whole batch, with (b, S) tokens or inputs that the model cuts itself.
        uneven: whether shards are uneven, without padding.
        whole_outputs: whether the model's outputs are those of the whole batch on every rank.
    """

    def __init__(
        self, sp: SequenceParallel, batch: Mapping[str, Any], uneven: bool, whole_outputs: bool
    ) -> None:
        self._sp, self._uneven, self._whole_outputs = sp, uneven, whole_outputs
        self.shape: tuple[int, ...] = ()
        """(b, S), with a row for each choice of a sample; () without tokens."""
        tokens = tokens_of(batch)
        if tokens is not None:
            by_token = 2 if tokens.is_floating_point() else tokens.dim()  # (b, choices, S) too
            shape, mask = tokens.shape[:by_token], batch.get("attention_mask")
            has_mask = isinstance(mask, Tensor) and mask.shape == shape
            valid = mask != 0 if has_mask else tokens.new_ones(shape, dtype=torch.bool)
            valid = valid.flatten(0, -2)
            self.shape = tuple(valid.shape)
            num_valid = int(valid.any(0).sum())
            self._positions = self._padded_positions(self.shape[1], tokens.device, num_valid)
            self._valid = pad(valid, (0, self._sp.size * len(self._positions)))  # False there

    def unflatten(self, x: Tensor, whole: bool) -> Tensor:
        """(b S, ...), from layers that route tokens, -> (b, S, ...); other tensors as they are."""
        if not self.shape or not x.dim():
            return x
        samples, seqlen = self.shape[0], self.shape[1] if whole else len(self._positions)
        is_flat = seqlen > 1 and x.shape[0] == samples * seqlen
        return x.unflatten(0, (samples, seqlen)) if is_flat else x

    def pair(self, part: Tensor, whole: Tensor) -> tuple[Tensor, Tensor, bool] | None:
        """(rows of `part`, the same of `whole`, whether `part` has fewer); 0 at padding.

        None if it is unknown which rows `part` has.
        """
        if part.dim() != whole.dim():
            return None
        dims = [dim for dim in range(whole.dim()) if part.shape[dim] != whole.shape[dim]]
        if len(dims) > 1:
            return None
        dim = dims[0] if dims else 1
        valid = self._valid_of(whole, dim)
        if dims:
            positions = self._positions_of_part(part.shape[dim], whole.shape[dim], whole.device)
            if positions is None:
                return None
            inside = (positions < whole.shape[dim]).nonzero().flatten()  # the others are padding
            valid = valid.expand_as(whole).index_select(dim, positions[inside])
            part, whole = part.index_select(dim, inside), whole.index_select(dim, positions[inside])
        return part.where(valid, 0), whole.where(valid, 0), bool(dims)

    def _positions_of_part(self, count: int, seqlen: int, device: torch.device) -> Tensor | None:
        """Positions of a part's `count` rows in a whole of `seqlen` rows; None if unknown, as where
        ranks that exchanged channels for tokens have `count` of `seqlen` channels."""
        is_by_token = bool(self.shape) and self.shape[1] - seqlen in MISSING_TOKENS
        if not is_by_token and not self._uneven:
            return None
        positions = self._positions if is_by_token else self._padded_positions(seqlen, device)
        return positions if len(positions) == count else None

    def _padded_positions(self, seqlen: int, device: torch.device, num_valid: int = 0) -> Tensor:
        """Positions of this rank's rows of `seqlen`; padding after `num_valid` is a document."""
        if self._uneven and seqlen >= self._sp.size:
            return self._sp.positions(seqlen, device, (0, seqlen))
        multiple = padding_multiple(self._sp.config.layout, self._sp.size)
        padded = -(-seqlen // multiple) * multiple
        return self._sp.positions(padded, device, (*sorted({0, num_valid, padded}),))

    def _valid_of(self, whole: Tensor, dim: int = 1) -> Tensor:
        """(b, 1, ..., S, 1, ...) bool: False at padding; a scalar True if `whole` is not by token.

        Tokens are in `dim`, samples in the first dimension or the one before the tokens.
        """
        for sample_dim in (0, dim - 1) if self.shape and whole.dim() > 1 else ():
            samples, seqlen = whole.shape[sample_dim], whole.shape[dim]
            if samples == self.shape[0] and self.shape[1] - seqlen in MISSING_TOKENS:
                sizes = [1] * whole.dim()
                sizes[sample_dim], sizes[dim] = samples, seqlen
                return self._valid[:, :seqlen].reshape(sizes)
        return torch.ones((), dtype=torch.bool, device=whole.device)

    def weights(self, x: Tensor, whole: bool) -> Tensor:
        """Weights of an output's elements in a loss that sums them, 0 at padding.

        Over all ranks every element counts once: one that all ranks have counts 1 / ranks on each.
        """
        if self.shape and not whole and not self._whole_outputs:
            if x.shape[:2] == (self.shape[0], len(self._positions)):
                valid = self._valid[:, self._positions].view(*x.shape[:2], *[1] * (x.dim() - 2))
                return _cosine_weights(x, self._positions) * valid
        return _cosine_weights(x) * self._valid_of(x) / (1 if whole else self._sp.size)


def _cosine_weights(x: Tensor, positions: Tensor | None = None) -> Tensor:
    """cos(1 + sum over dims of frequency x index), with `positions` as indices of dim 1."""
    phase = torch.ones((), dtype=torch.float64, device=x.device)
    for dim, (size, frequency) in enumerate(zip(x.shape, FREQUENCIES, strict=False)):
        index = torch.arange(size, device=x.device) if dim != 1 or positions is None else positions
        phase = phase + frequency * index.view(-1, *[1] * (x.dim() - dim - 1))
    return phase.cos().to(x.dtype)
