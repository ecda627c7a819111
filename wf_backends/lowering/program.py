"""What one rank does in one pass, as plain data: buffers, tiles and messages.

Rows of a buffer are in sequence order. All slices are local to their buffer, in rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from wf_backends.lowering.tiles import Tile
from wf_backends.schedule import Ranges, locate, locate_each, range_length, size

OWN_MESSAGE_ROWS = 256
"""Least length of a range of positions that is sent as a message of its own. Such a range is
neither packed by its sender nor unpacked by its receiver; if one is shorter, all share one."""


@dataclass(frozen=True)
class Parcel:
    """Rows of one message: slices of this rank's buffer, and the rank at the other end."""

    peer: int
    rows: Ranges

    @cached_property
    def num_rows(self) -> int:
        return size(self.rows)


Parcels = tuple[Parcel, ...]


def parcels(peer: int, rows: Ranges, held: Ranges, whole: bool = False) -> Parcels:
    """The parcels that carry the positions `rows` between a buffer of this rank and the peer's.

    Sender and receiver cut alike: each range of positions is one slice of either buffer.

    Args:
        held: positions in this rank's buffer. whole: put all rows into one parcel.
    """
    if not whole and len(rows) > 1 and min(map(range_length, rows)) >= OWN_MESSAGE_ROWS:
        return tuple(Parcel(peer, (piece,)) for piece in locate_each(rows, held))
    return (Parcel(peer, locate(rows, held)),) if rows else ()


def hop_parcels(peer: int, rows: Ranges, held: Ranges, peer_held: Ranges) -> Parcels:
    """As `parcels`, but one parcel if the rows are contiguous in both ranks' buffers."""
    is_contiguous = len(locate(rows, held)) == len(locate(rows, peer_held)) == 1
    return parcels(peer, rows, held, whole=is_contiguous)


PeerRows = tuple[int, Ranges]  # a peer, and rows (positions) that are sent to it or come from it


def parcels_of_peers(rank: int, rows_of_peers: Iterable[PeerRows], held: Ranges) -> Parcels:
    """The parcels of a rank; rows that it keeps itself are in one parcel."""
    several = (parcels(peer, rows, held, whole=peer == rank) for peer, rows in rows_of_peers)
    return tuple(chain.from_iterable(several))


@dataclass(frozen=True, slots=True)
class Gather:
    """How walkers of the first step are gathered. Parcels from a rank to itself are local copies.

    Slices of `send` are in this rank's own shard (`shard_rows` rows), those of `receive` in the
    buffer (`num_rows` rows).
    """

    shard_rows: int
    num_rows: int
    send: Parcels
    receive: Parcels


@dataclass(frozen=True, slots=True)
class Stay:
    """The buffer of the side that stays: `num_rows` rows, of this rank's shard and of others'."""

    shard_rows: int
    num_rows: int
    own_in_shard: Ranges
    """Slices of this rank's own shard that the buffer holds."""
    own_in_buffer: Ranges
    """The same rows as slices of the buffer."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """What this rank sends and receives at one time."""

    send: Parcels = ()
    receive: Parcels = ()


@dataclass(frozen=True, slots=True)
class Round:
    """A part of a step: tiles on some rows of the side that stays, and their messages.

    `fetch` sends rows of this rank's own shard to readers, and receives rows of other owners into
    the buffer. It must have arrived before the tiles. `reduce` sends finished results from the
    buffer to owners after the tiles, and receives results for rows of this rank's own shard.

    With a `host_size` above 1 (lowering/gather_rounds.py) there are two more exchanges, between
    buffers of ranks of one host. `pass_on` sends fetched rows to other readers: it is posted before
    the tiles, and must have arrived before the next round. `pass_back` sends their results to the
    rank that fetched: it is posted after the tiles, and must have arrived before the next `reduce`.
    """

    tiles: tuple[Tile, ...]
    fetch: Exchange = Exchange()
    reduce: Exchange = Exchange()
    pass_on: Exchange = Exchange()
    pass_back: Exchange = Exchange()


@dataclass(frozen=True, slots=True)
class Step:
    """One step: compute on the held walkers, round by round, while the next walkers arrive.

    Walkers have four exchanges. Slices are in the buffer of this step ("held", `num_rows` rows), of
    the next step in which this rank reads any walkers ("next", `next_num_rows` rows), or in this
    rank's own shard ("own"):

        exchange  of                                            from    into
        hop       rows, to the next rank of the hop             held    next
        owner     rows, to the ranks that read them next        own     next
        partial   partial results, along with the hop           held    next
        reduce    partial results, to the owners of their rows  held    own

    Rows are sent during the step, partial results after it.
    """

    num_rows: int
    rounds: tuple[Round, ...]
    blank: Ranges
    """Slices of the buffer whose results must be zeroed; the first tile overwrites all others."""
    next_num_rows: int
    hop: Exchange
    owner: Exchange
    partial: Exchange
    reduce: Exchange

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to compute, to send or to receive during this step."""
        moves_rows = (self.hop, self.owner) != (Exchange(), Exchange())
        return not moves_rows and all(round_ == Round(()) for round_ in self.rounds)

    @property
    def moves_partials(self) -> bool:
        """Whether partial results are sent or received after this step."""
        return (self.partial, self.reduce) != (Exchange(), Exchange())


@dataclass(frozen=True)
class RankProgram:
    """Everything that one rank does in one pass.

    All ranks post their messages in this order: `walk`, and `fetch` of all rounds of the first
    step. Then, in each step: hops, partial results of the step before (`partial`, then `reduce`),
    rows from owners, and the exchanges of its rounds.
    """

    rank: int
    queries_walk: bool
    stay: Stay
    walk: Gather
    steps: tuple[Step, ...]
    blank: Ranges
    """As in `Step`, for the buffer of the side that stays."""

    @cached_property
    def stay_is_local(self) -> bool:
        """Whether no rows of the side that stays, and no results for them, are ever sent."""
        return all(round_ == Round(round_.tiles) for step in self.steps for round_ in step.rounds)

    @cached_property
    def busy_steps(self) -> tuple[int, ...]:
        """The steps in which something happens. With documents or windows, most steps are idle."""
        return tuple(
            index
            for index, step in enumerate(self.steps)
            if not step.is_idle or (index > 0 and self.steps[index - 1].moves_partials)
        )
