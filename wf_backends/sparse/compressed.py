"""Attention to the keys of a window, and to entries that stand for groups of tokens.

A layer of DeepSeek-V4 pools each group of m tokens into one entry, which is key and value. A row
sees the keys of its window, and of the entries of complete groups before it all (heavily compressed
attention) or those that an indexer chose (compressed sparse attention). A rank pools the groups
that end in its rows, for which it gets the few rows before its own. Then it gets the entries of all
ranks, S / m rows, by one all-gather, and the keys that its windows see. The gradients of rows that
several ranks had are summed at their owner.

Shapes: b batch, s rows of this rank, S rows of the sequence, h query heads, d head_dim, n groups
that end in this rank's rows, T entries of the sequence, t chosen entries of a row.
Source: DeepSeek-V4, section 2.3.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from wf_backends._compile import eager
from wf_backends._validation import positive
from wf_backends.comm import ConsistencyCheck, Shared, fingerprint
from wf_backends.parallel import SequenceParallel, check_tensors, make_softmax
from wf_backends.runtime import positions
from wf_backends.schedule import Layout, Mask, join, layout_of, locate, make_mask
from wf_backends.sparse.function import BOTH, KeysAttention
from wf_backends.sparse.needed_rows import gather_needed, with_earlier_rows
from wf_backends.sparse.readers import ChosenRows, KeyRanges


class Groups(NamedTuple):
    """Groups of tokens whose last token is a row of this rank."""

    rows: Tensor
    """(b, n, reach, c): what each entry is made of."""
    is_there: Tensor
    """(n, reach) bool. Of a document's first groups rows before the document are not there."""
    last: Tensor
    """(n,), which of this rank's rows is the group's last."""


Pool = Callable[[Groups], Tensor]
"""The entries (b, n, d) of groups."""


class Entries(NamedTuple):
    """The entries of the sequence, and those that each row of this rank may see: the ones of its
    document's groups that end with the row or before it."""

    values: Tensor
    """(b, T, d), in sequence order."""
    first: Tensor
    """(s,), the first entry of the row's document; on the CPU."""
    count: Tensor
    """(s,), how many entries the row may see; on the CPU."""


class OwnRows(NamedTuple):
    """This rank's rows; (s,) each, on the CPU."""

    place: Tensor
    """Where the row is among the rows that the rank needs."""
    document: Tensor
    """The number of its document."""
    offset: Tensor
    """Its offset in the document."""


class CompressedAttention(Shared):
    """Exact attention of this rank's rows to windows and entries of the whole sequence of `sp`."""

    def __init__(self, sp: SequenceParallel) -> None:
        self._sp, self._consistency = sp, ConsistencyCheck(sp.comm)

    @eager
    def compress(
        self,
        x: Tensor,
        ratio: int,
        pool: Pool,
        reach: int | None = None,
        cu_seqlens: Sequence[int] | None = None,
        name: str | None = None,
    ) -> Entries:
        """The entries of all groups, on each rank.

        Groups are counted from the start of each document; tokens after its last complete group
        have no entry.

        Args:
            x: (b, s, c), any float dtype: what the entries are made of, of this rank's rows.
            ratio: tokens of a group.
            pool: makes the entries of this rank's groups. It is called once, also without groups;
                gradients of parameters that it uses are this rank's part.
            reach: how many tokens make an entry, up to the last one of its group; None = `ratio`.
            cu_seqlens: the borders of packed documents, host integers.
            name: of the layer, in errors.

        Raises:
            ValueError: for a ratio or a reach below 1, tensors that do not belong together on the
                ranks, and a pool that returns something else than one entry of each group.
        """
        with self._consistency:
            positive("ratio", ratio)
            positive("reach", reach := ratio if reach is None else reach)
            if x.dim() != 3:
                raise ValueError(f"x must be (b, s, c), got {tuple(x.shape)}")
            mask = make_mask(cu_seqlens=cu_seqlens)
        same = {"batch and channels": (len(x), x.shape[2]), "ratio": ratio, "reach": reach}
        layout, borders = self._layout(x, same, mask, name)
        needed = with_earlier_rows(layout, reach - 1, borders)
        rows = gather_needed(self._sp.comm, layout, needed, x, "groups")
        own_rows = self._own_rows(layout, needed, borders)
        groups = _ending_groups(rows, own_rows, ratio, reach)
        own = pool(groups)
        if own.dim() != 3 or own.shape[:2] != groups.rows.shape[:2]:
            got = f"{tuple(own.shape)} for groups.rows {tuple(groups.rows.shape)}"
            raise ValueError(f"pool must return (b, n, d), got {got}")
        owned = _entries_of(layout, ratio, borders)
        values = gather_needed(self._sp.comm, owned, None, own, "entries")
        return Entries(values, *_visible(own_rows, ratio, borders))

    @eager
    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        entries: Tensor,
        chosen: Tensor | None,
        window: int,
        ratio: int = 0,
        softmax_scale: float | None = None,
        sinks: Tensor | None = None,
        cu_seqlens: Sequence[int] | None = None,
        name: str | None = None,
    ) -> Tensor:
        """Attention of each row to the last `window` keys up to its own, and to chosen entries.

        All heads have the same keys, which are the values too.

        Args:
            q: (b, s, h, d), any float dtype. kv: (b, s, d).
            entries: (b, T, d), the values of `compress`.
            chosen: (b, s, t) integers: the entries that a row sees, none twice; -1 = none. None:
                all that it may see, as `Entries` says.
            window: tokens, the row's own among them.
            ratio: as in `compress`; needed where `chosen` is None.
            softmax_scale, sinks, name: as in `sp.attention`. cu_seqlens: as in `compress`.

        Returns:
            (b, s, h, d), q's dtype.

        Raises:
            ValueError: for tensors that do not fit, on this rank or between ranks.
        """
        with self._consistency:  # an error in this block is raised on all ranks
            check_tensors(q, *2 * [kv.unsqueeze(2)])
            softmax = make_softmax(q, softmax_scale, 0.0, None, sinks)
            positive("window", window)
            _check_entries(entries, chosen, q, kv)
            if chosen is None:
                positive("ratio", ratio)
            mask = make_mask(cu_seqlens=cu_seqlens)
        shapes = {"q, beside the rows": (len(q), *q.shape[2:]), "entries": tuple(entries.shape)}
        same = shapes | {"options": softmax.options, "window": window}
        same |= {"ratio": ratio, "chosen": chosen is not None}
        layout, borders = self._layout(kv, same, mask, name)
        if chosen is None:
            _check_number(entries, ratio, borders)
        needed = with_earlier_rows(layout, window - 1, borders)
        with torch.autocast(q.device.type, enabled=False):
            keys = gather_needed(self._sp.comm, layout, needed, kv, "window")
            own_rows = self._own_rows(layout, needed, borders)
            place, earlier = own_rows.place, own_rows.offset.clamp(max=window - 1)
            in_window = torch.stack((place - earlier, place + 1))
            if chosen is None:
                first, count = _visible(own_rows, ratio, borders)
                of_entries = entries, torch.stack((first, first + count))
                make = KeyRanges, KeyRanges
            else:
                of_entries = entries.unsqueeze(2), chosen.unsqueeze(2)
                make = KeyRanges, partial(ChosenRows, BOTH)
            sinks, scale = softmax.learned.sinks, softmax.scores.scale
            return KeysAttention.apply(q, sinks, scale, make, keys, in_window, *of_entries)

    def _layout(
        self, x: Tensor, same: dict[str, object], mask: Mask, name: str | None
    ) -> tuple[Layout, tuple[int, ...]]:
        """Check that all ranks make the same call; which rows they have, and the documents."""
        same |= {"dtype": x.dtype, "cu_seqlens": mask.cu_seqlens}
        same |= {"needs a gradient": torch.is_grad_enabled() and x.requires_grad}
        numbers, lengths = {key: fingerprint(y) for key, y in same.items()}, {"rows": x.shape[1]}
        rows = self._consistency.check(numbers, lengths, x, layer=name, objects=same)["rows"]
        borders = mask.cu_seqlens or (0, sum(rows))
        return layout_of(self._sp.config.layout, rows, mask, "rows"), borders

    def _own_rows(self, layout: Layout, needed: Layout, borders: tuple[int, ...]) -> OwnRows:
        shard, held = layout[self._sp.rank], needed[self._sp.rank]
        rows, starts = positions(shard), torch.tensor(borders)
        document = torch.searchsorted(starts, rows, right=True) - 1
        return OwnRows(positions(locate(shard, held)), document, rows - starts[document])


def _ending_groups(rows: Tensor, own_rows: OwnRows, ratio: int, reach: int) -> Groups:
    """The groups that end in this rank's rows. rows: (b, needed rows, c)."""
    last = ((own_rows.offset + 1) % ratio == 0).nonzero().flatten()
    back = torch.arange(1 - reach, 1)
    places = (own_rows.place[last, None] + back).clamp(min=0)  # (n, reach)
    is_there = own_rows.offset[last, None] + back >= 0
    taken = rows.index_select(1, places.flatten().to(rows.device)).unflatten(1, places.shape)
    return Groups(taken, is_there.to(rows.device), last.to(rows.device))


def _first_entries(ratio: int, borders: Sequence[int]) -> list[int]:
    """The first entry of each document; at last the number of all entries."""
    numbers = ((stop - start) // ratio for start, stop in pairwise(borders))
    return list(accumulate(numbers, initial=0))


def _visible(own_rows: OwnRows, ratio: int, borders: Sequence[int]) -> tuple[Tensor, Tensor]:
    """`first` and `count` of `Entries`."""
    first = torch.tensor(_first_entries(ratio, borders))
    return first[own_rows.document], (own_rows.offset + 1) // ratio


@lru_cache(maxsize=64)
def _entries_of(layout: Layout, ratio: int, borders: tuple[int, ...]) -> Layout:
    """By rank: the entries whose groups end in its rows."""
    first = _first_entries(ratio, borders)

    def before(position: int) -> int:
        document = bisect_right(borders, position) - 1
        return first[document] + (position - borders[document]) // ratio

    return tuple(join((before(start), before(stop)) for start, stop in rows) for rows in layout)


def _check_entries(entries: Tensor, chosen: Tensor | None, q: Tensor, kv: Tensor) -> None:
    if q.shape[:2] != kv.shape[:2]:
        got = f"q {tuple(q.shape)}, kv {tuple(kv.shape)}"
        raise ValueError(f"q and kv must be the same rows, got {got}")
    if entries.dim() != 3 or (len(entries), entries.shape[2]) != (len(q), q.shape[3]):
        raise ValueError(
            f"entries must be (b, T, d) for q {tuple(q.shape)}, got {tuple(entries.shape)}"
        )
    if entries.dtype != q.dtype:
        raise ValueError(f"entries must have q's dtype, {q.dtype}, got {entries.dtype}")
    if chosen is None:
        return
    fits = chosen.dim() == 3 and chosen.shape[:2] == q.shape[:2]
    if not fits or chosen.dtype.is_floating_point or chosen.dtype == torch.bool:
        got = f"{tuple(chosen.shape)} of {chosen.dtype}"
        raise ValueError(f"chosen must be integers (b, s, t) for q {tuple(q.shape)}, got {got}")
    if chosen.is_cpu and chosen.numel() and int(chosen.max()) >= entries.shape[1]:
        got = int(chosen.max())
        raise ValueError(f"chosen must be of {entries.shape[1]} entries, or -1, got {got}")


def _check_number(entries: Tensor, ratio: int, borders: Sequence[int]) -> None:
    expected = _first_entries(ratio, borders)[-1]
    if entries.shape[1] != expected:  # raised on all ranks
        raise ValueError(
            f"entries must be those of groups of ratio={ratio} tokens, {expected} in this "
            f"sequence, got {entries.shape[1]}"
        )
