"""What one rank does in one pass, as plain data: buffers, tiles and messages.

Pure: standard library only. Rows of a buffer are in sequence order; slices are local to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from wf_backends.lowering.tiles import Tile
from wf_backends.schedule import Ranges, locate, locate_each, size, span

OWN_MESSAGE_ROWS = 256
"""Rows from which a range of positions is a message of its own: then it is neither packed before
it is sent nor unpacked where it lands. Shorter ones share one."""


@dataclass(frozen=True)
class Parcel:
    """Rows that one message carries: slices of this rank's buffer, and who is at the far end."""

    peer: int
    rows: Ranges

    @cached_property
    def num_rows(self) -> int:
        return size(self.rows)


Parcels = tuple[Parcel, ...]


def parcels(peer: int, rows: Ranges, held: Ranges, whole: bool = False) -> Parcels:
    """What carries the positions `rows` between this rank's buffer of `held` and the peer's.

    Both ends cut alike: a range of positions is one slice of either buffer.

    Args:
        whole: all rows in one parcel.
    """
    if not whole and len(rows) > 1 and min(map(span, rows)) >= OWN_MESSAGE_ROWS:
        return tuple(Parcel(peer, (piece,)) for piece in locate_each(rows, held))
    return (Parcel(peer, locate(rows, held)),) if rows else ()


def forward_parcels(peer: int, rows: Ranges, held: Ranges, far: Ranges) -> Parcels:
    """As `parcels`, to or from a buffer of `far`; one message where both ends need no packing."""
    slices = len(locate(rows, held)), len(locate(rows, far))
    return parcels(peer, rows, held, whole=slices == (1, 1))


@dataclass(frozen=True, slots=True)
class Gather:
    """Rows of shards gathered in one buffer; transposed, their results sent to the owners.

    `give` slices this rank's own shard of `shard_rows` rows, `take` slices the buffer of
    `num_rows` rows. A parcel to oneself is no message.
    """

    shard_rows: int
    num_rows: int
    give: Parcels
    take: Parcels


@dataclass(frozen=True, slots=True)
class Stay:
    """The buffer of the side that stays: rows of this rank's own shard, and of other owners'."""

    shard_rows: int
    num_rows: int
    mine: Ranges
    """Slices of this rank's own shard that the buffer holds."""
    at: Ranges
    """Where they lie in the buffer."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """What this rank sends and receives in one round."""

    send: Parcels = ()
    receive: Parcels = ()


@dataclass(frozen=True, slots=True)
class Round:
    """Tiles on the rows of one owner, or of all.

    Before them `fetch` must have arrived (sent: slices of this rank's own shard; received: of the
    buffer that stays). After them the owner's results are finished and sent to it by `home` (sent:
    slices of the buffer; received: of this rank's own shard).

    Where a row crosses to a host once (lowering/gather_rounds.py), both have a second half inside
    the host, of slices of the buffer on both sides: `pass_on` sends what was fetched to other
    readers, before the tiles, and must have arrived before the next round; `pass_back` brings
    their results together, after the tiles, and must have arrived before the next round's `home`.
    """

    tiles: tuple[Tile, ...]
    fetch: Exchange = Exchange()
    home: Exchange = Exchange()
    pass_on: Exchange = Exchange()
    pass_back: Exchange = Exchange()


@dataclass(frozen=True, slots=True)
class Step:
    """One step: compute on the held walkers, round by round, while the next ones arrive.

    `blank` are the held rows whose partial results start from nothing; a tile overwrites the rest.
    `forwarded` goes to the next rank of the hop, `take` is what the one before forwards; `give`
    goes to whoever reads this rank's own rows next, `get` is what owners give. What arrives fills
    the buffer of the next step in which this rank reads anything; `more` are its rows. Slices of
    `forwarded`, `partial_*` and `home_out` are in this step's buffer of held rows, those of `take`
    and `get` in the one that fills, those of `give` and `home_in` in this rank's own shard.
    """

    num_rows: int
    rounds: tuple[Round, ...]
    blank: Ranges
    forwarded: Parcels
    take: Parcels
    give: Parcels
    get: Parcels
    more: int
    partial_in: Parcels
    partial_out: Parcels
    home_out: Parcels
    home_in: Parcels

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """Those of all rounds, in order."""
        return tuple(tile for one in self.rounds for tile in one.tiles)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to compute, to send or to receive."""
        messages = self.forwarded or self.take or self.give or self.get or self.partial_in
        return not messages and all(one == Round(()) for one in self.rounds)

    @property
    def parts(self) -> bool:
        """Whether partial results are sent or received after it."""
        return bool(self.partial_out or self.home_out or self.home_in)


@dataclass(frozen=True)
class RankProgram:
    """Everything that one rank does in one pass.

    All ranks post their messages in one order: those of `walk`, the fetches of the first step's
    rounds, and then for each step what is forwarded, what partial results go on or home, what
    owners give and, round by round, what goes home.
    """

    rank: int
    queries_walk: bool
    stay: Stay
    walk: Gather
    steps: tuple[Step, ...]
    blank: Ranges
    """As in Step, of the side that stays."""

    @cached_property
    def met(self) -> tuple[frozenset[int], ...]:
        """By step, the peers of its hop: of what is forwarded, and of the last partial results.

        What owners give to or get from one of them goes with the hop, since a link that carries one
        way a long message in another post does not even ask for what comes the other way.
        """
        found = list[frozenset[int]]()
        for before, step in zip((None, *self.steps), self.steps, strict=False):
            hop = [*step.forwarded, *step.take]
            if before is not None:
                hop += (*before.partial_out, *step.partial_in, *before.home_out, *before.home_in)
            found.append(frozenset(parcel.peer for parcel in hop))
        return tuple(found)

    @cached_property
    def stays_alone(self) -> bool:
        """Whether neither rows that stay nor results for them go from rank to rank."""
        return all(one == Round(one.tiles) for step in self.steps for one in step.rounds)

    @cached_property
    def busy(self) -> tuple[int, ...]:
        """The steps in which something happens: under documents and windows most are empty."""
        before = (None, *self.steps)
        pairs = enumerate(zip(before, self.steps, strict=False))
        return tuple(at for at, (last, one) in pairs if not one.is_idle or (last and last.parts))
