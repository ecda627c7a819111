"""The keys and values of one layer on all ranks, and attention of new tokens over them.

A rank keeps the keys and values of its rows of the prompt. New tokens are the same on every rank.
Each rank computes the attention of all of them over its own keys, and the results of the ranks are
merged:

    lse = log sum_r exp(lse_r);  out = sum_r exp(lse_r - lse) out_r

The keys and values of new tokens stay on the rank that has the fewest, and keys that a window
hides from all later tokens are dropped.

Shapes: b batch, n new tokens, s rows of this rank, h query heads, g key heads, d head_dim of
queries and keys, e of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf

import torch
from torch import Tensor

from wf_backends.comm import Communicator, ConsistencyCheck, Shared, fingerprint, gather_small
from wf_backends.kernels import Kernel, KernelSpec, Scores, select
from wf_backends.lowering import make_tiles
from wf_backends.parallel import SequenceParallel, check_tensors, make_softmax
from wf_backends.runtime import ForwardTiles, accumulator_dtype, fuse, with_sinks
from wf_backends.schedule import (
    LAYOUTS,
    Mask,
    Ranges,
    intersect,
    join,
    locate,
    make_layout,
    make_mask,
    size,
)

SLACK = 128
"""Tokens that `crop` can take back where keys are dropped. Speculative drafts have 10 to 20."""
BLOCK = 128
"""Tokens that a rank takes before another does, for which its buffer grows at once, and that are
dropped at once: a rank whose tokens lie in few ranges calls few kernels."""

Masks = list[tuple[slice, Mask]]  # (samples, their mask); all samples together


class KeyValueCache(Shared):
    """The keys and values that one layer's attention has seen, on the ranks of `sp`.

    Args:
        sp: with the layout "zigzag" or "contiguous".
        window_size: (left, right) in tokens, -1 = unlimited, as in `sp.attention`. A window to the
            left bounds the cache: keys that no later token sees are dropped.
        slack: tokens that `crop` can take back nevertheless.

    Attributes:
        length: tokens on all ranks.
        first: the first token that is kept.

    Raises:
        ValueError: for a layout that follows from documents or slices, a malformed window, and a
            slack that is no number of tokens.
    """

    def __init__(
        self, sp: SequenceParallel, window_size: tuple[int, int] = (-1, -1), slack: int = SLACK
    ) -> None:
        layout = sp.config.layout
        if LAYOUTS[layout].needs_documents or LAYOUTS[layout].needs_slices:
            raise ValueError(
                f'a cache needs "layout": "zigzag" or "contiguous", got "{layout}", which follows '
                "from documents or slices"
            )
        if type(slack) is not int or slack < 0:
            raise ValueError(f"slack must be a number of tokens, at least 0; got {slack!r}")
        self._sp, self._consistency = sp, ConsistencyCheck(sp.comm)
        self._compared: dict[str, int] | None = None  # of the last call
        self._layout: list[Ranges] = [()] * sp.size
        self._owner = 0  # the rank of the last new token
        self._kv: Tensor | None = None  # [K|V] (s or more, b, g, d + e): free rows come last
        self.length = self.first = 0
        self.window_size, self._slack = window_size, slack
        self._mask = make_mask(causal=True, window_size=window_size)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's keys and values. The buffer has up to BLOCK free rows more."""
        return 0 if self._kv is None else self._kv[: self._num_rows].nbytes

    @property
    def _num_rows(self) -> int:
        return size(self._layout[self._sp.rank])

    def keep(self, k: Tensor, v: Tensor, seqlen: int) -> None:
        """Keep this rank's rows of a prompt, which `sp.attention` gets too: those in reach.

        Args:
            k: (b, s, g, d), v: (b, s, g, e): the rows that `sp.shard` gives of `seqlen` tokens.
            seqlen: tokens of the prompt, all ranks.

        Raises:
            ValueError: if the cache is not empty, or these are not this rank's rows.
        """
        layout = make_layout(self._sp.config.layout, self._sp.size, seqlen)
        rows = size(layout[self._sp.rank])
        if self.length or k.shape[1] != rows or v.shape[1] != rows:
            raise ValueError(
                f"an empty cache keeps the {rows} rows of {self._sp.comm.me} of a prompt of "
                f"{seqlen} tokens, got k {tuple(k.shape)}, v {tuple(v.shape)} for a cache of "
                f"{self.length} tokens"
            )
        self._kv, self._layout, self.length = fuse(k, v), list(layout), seqlen
        self._drop_unseen()

    @torch.no_grad()
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        starts: Sequence[int] | None = None,
    ) -> Tensor:
        """Add new tokens, and return their causal attention over all tokens so far; no gradient.

        Args:
            q: (b, n, h, d), k: (b, n, g, d), v: (b, n, g, e), the same on every rank.
            softmax_scale, softcap, alibi_slopes, sinks: as in `sp.attention`.
            starts: for each sample the first token that is seen, where samples have padding on
                their left, the same on every rank; None = 0 for all.

        Returns:
            (b, n, h, e), q's dtype, the same on every rank.

        Raises:
            ValueError: for an empty cache, and for tensors or options that do not fit it or differ
                between ranks.
        """
        with self._consistency:  # an error in this block is raised on all ranks
            check_tensors(q, k, v)
            softmax = make_softmax(q, softmax_scale, softcap, alibi_slopes, sinks)
            self._check_fit(k, v)
            stop = self.length + q.shape[1]
            starts = [*(starts or [0] * len(q))]
            masks = _masks(self._mask, starts, len(q), stop)
        compared = {
            "shapes of new tokens": fingerprint((q.shape, k.shape, v.shape, q.dtype)),
            "options": fingerprint((softmax.options, self.window_size, starts)),
        }
        if compared != self._compared:  # an exchange takes as long as the merge
            self._consistency.check(compared, {}, q)
            self._compared = compared
        rows = ((self.length, stop),)
        self._append(k, v)
        kernel = _kernel(self._sp.config.kernel, softmax.scores, q, k, v)
        tiles = ForwardTiles(kernel, softmax.scores, q.shape[-1])
        out, lse = self._over_own_keys(tiles, rows, masks, q, v)
        self._drop_unseen()
        out, lse = merged(self._sp.comm, out, lse)
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
        return out.transpose(0, 1).to(q.dtype)

    def take_samples(self, samples: Tensor) -> None:
        """Take samples (b',) of the batch in place of all, also repeated, as beam search does."""
        if self._kv is not None:
            self._kv = self._kv.index_select(1, samples.to(self._kv.device))

    def crop(self, length: int) -> None:
        """Keep the first tokens, at most `length`.

        Raises:
            ValueError: as `check_crop`.
        """
        self.check_crop(length)
        self._cut(0, length)

    def check_crop(self, length: int) -> None:
        """Raise a ValueError if a token after the first `length` sees keys that were dropped."""
        if length < 0:
            raise ValueError(f"crop({length}): give the number of tokens to keep, at least 0")
        least = self.first + self._mask.band.left
        if self.first and 0 < length < least:
            raise ValueError(
                f"crop({length}) of {self.length} tokens: a window {self.window_size} has dropped "
                f"the keys before token {self.first}, which leaves {least} tokens at least, or 0; "
                f"to take back more, make the cache with a slack= above {self._slack}"
            )

    def _drop_unseen(self) -> None:
        """Drop keys that no later token sees, even if `slack` tokens are taken back."""
        first = self.length - self._slack - self._mask.band.left
        if first >= self.first + BLOCK:
            self._cut(int(first), self.length)

    def _cut(self, start: int, stop: int) -> None:
        """Keep the keys of the tokens from `start` to `stop`."""
        rank, kept = self._sp.rank, join([(start, stop)])
        layout = [intersect(ranges, kept) for ranges in self._layout]
        ((first, last),) = locate(layout[rank], self._layout[rank]) or ((0, 0),)  # rows in order
        if self._kv is not None and (first > 0 or len(self._kv) > last + BLOCK):
            self._kv = self._kv[first:last].clone()
        self._layout, self.length = layout, min(self.length, stop)
        self.first = max(self.first, start) if self.length else 0

    def _check_fit(self, k: Tensor, v: Tensor) -> None:
        kv = self._kv
        if kv is None:
            raise ValueError("the cache is empty: keep() the rows of a prompt first")
        new = k.shape[0], k.shape[2], k.shape[3] + v.shape[3]
        if new != kv.shape[1:] or k.dtype != kv.dtype or k.device != kv.device:
            raise ValueError(
                f"new keys and values must be as those of the cache, (batch, heads, dims of k and "
                f"v) {tuple(kv.shape[1:])}, {kv.dtype} on {kv.device}; got {new}, {k.dtype} on "
                f"{k.device}"
            )

    def _append(self, k: Tensor, v: Tensor) -> None:
        """Add the keys of new tokens on a rank with at most BLOCK more than any other."""
        sizes = [size(ranges) for ranges in self._layout]
        if sizes[self._owner] >= min(sizes) + BLOCK:
            self._owner = sizes.index(min(sizes))
        if self._owner == self._sp.rank:
            self._write(fuse(k, v))
        stop = self.length + k.shape[1]
        self._layout[self._owner] = join((*self._layout[self._owner], (self.length, stop)))
        self.length = stop

    def _write(self, new: Tensor) -> None:
        """Write [K|V] (n, b, g, d + e) after this rank's rows, in a larger buffer if it is full."""
        assert self._kv is not None
        first, stop = self._num_rows, self._num_rows + len(new)
        if stop > len(self._kv) or self._kv.is_inference():
            with torch.inference_mode(False):  # later calls, in any mode, write to the buffer
                larger = new.new_empty((first + max(BLOCK, len(new)), *new.shape[1:]))
            larger[:first] = self._kv[:first]
            self._kv = larger
        self._kv[first:stop] = new

    def _over_own_keys(
        self, tiles: ForwardTiles, rows: Ranges, masks: Masks, q: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(out (n, b, h, e), lse (n, b, h)) of new tokens at `rows` over this rank's keys."""
        assert self._kv is not None
        queries, dtype = q.transpose(0, 1), accumulator_dtype(q.dtype)
        out = q.new_zeros((*queries.shape[:-1], v.shape[-1]), dtype=dtype)
        lse = q.new_full(queries.shape[:-1], -inf, dtype=dtype)
        held, kv = (rows, self._layout[self._sp.rank]), self._kv[: self._num_rows]
        for samples, mask in masks:
            q_rows, keys, *results = (x[:, samples] for x in (queries, kv, out, lse))
            for tile in _tiles(*held, mask):
                tiles(replace(tile, held=held), (q_rows,), (keys,), tuple(results), ())
        return out, lse


def _masks(mask: Mask, starts: Sequence[int], num_samples: int, stop: int) -> Masks:
    """The masks of `stop` tokens: padding before a start is a document of its own."""
    if len(starts) != num_samples or not all(0 <= start < stop for start in starts):
        raise ValueError(
            f"starts must be a token from 0 to {stop - 1} for each of the {num_samples} samples, "
            f"got {starts}: padding ends there, and with the new tokens there are {stop}. A cache "
            "with padding is cropped to more tokens than its padding, or to 0"
        )
    if not any(starts):
        return [(slice(None), mask)]
    borders = [(0, start, stop) if start else (0, stop) for start in starts]
    return [(slice(i, i + 1), replace(mask, cu_seqlens=c)) for i, c in enumerate(borders)]


def merged(comm: Communicator, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The results of all ranks, merged in the order of the ranks, so that all get equal bits.

    Args:
        out: (n, b, h, e), lse: (n, b, h), over this rank's keys; 0 and -inf where none is seen.
    """
    if comm.size == 1:
        return out, lse
    outs = gather_small(comm, torch.cat((out, lse.unsqueeze(-1)), -1), "decode")
    all_lse = outs[..., -1]
    lse = all_lse.logsumexp(0)
    weights = torch.exp(all_lse - lse.masked_fill(lse == -inf, 0.0))
    return (weights.unsqueeze(-1) * outs[..., :-1]).sum(0), lse


def _kernel(name: str, scores: Scores, q: Tensor, k: Tensor, v: Tensor) -> Kernel:
    dims = q.shape[3], q.shape[2], k.shape[2], v.shape[3]
    options = scores.softcap > 0, scores.slopes is not None
    return _selected(name, KernelSpec(q.device.type, q.dtype, *dims, *options, looks_back=True))


_selected = lru_cache(maxsize=64)(select)
_tiles = lru_cache(maxsize=64)(make_tiles)  # the same in all layers of a model
