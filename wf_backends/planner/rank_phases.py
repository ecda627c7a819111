"""What one rank does in a pass, phase by phase: its messages with their bytes, and its tiles.

Pure: standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from wf_backends.lowering import Parcel, RankProgram, RowBytes, Step, Tile, met

Messages = list[tuple[int, int]]  # (peer, bytes)


@dataclass(frozen=True, slots=True)
class RankPhase:
    """What one rank does in a phase: the messages and tiles of the rounds, and the hop."""

    label: str
    hop: Messages
    fetches: tuple[Messages, ...] = ()
    tiles: tuple[tuple[Tile, ...], ...] = ()
    leaves: tuple[Messages, ...] = ()
    gives: Messages = field(default_factory=list[tuple[int, int]])
    """What others read next, sent apart from the hop; who gets nothing so does not wait for it."""
    pass_on: tuple[Messages, ...] = ()
    """By round: what was fetched, sent on inside the host."""
    pass_back: tuple[Messages, ...] = ()


def rank_phases(program: RankProgram, rows: RowBytes, name: str) -> Iterator[RankPhase]:
    """Everything that one rank does in a pass, in order.

    The bytes are those of `message_bytes.bytes_sent`, and of the executor; there fetches count as
    gathering, and `leaves` as results sent home.
    """

    def messages(parcels: Iterable[Parcel | None], row: int) -> Messages:
        sent = ((parcel.peer, parcel.num_rows * row) for parcel in parcels if parcel)
        return [(peer, num_bytes) for peer, num_bytes in sent if peer != program.rank and num_bytes]

    def partials(step: Step | None) -> Messages:
        if step is None:
            return []
        return messages((step.partial_out, *step.home_out), rows.walk_partial)

    yield RankPhase(f"{name} gather", messages(program.walk.give, rows.walk_gathered))
    before, busy = None, set(program.busy)
    for index, step in enumerate(program.steps):
        if index not in busy:
            yield RankPhase(f"{name} step {index}", [])
            before = step
            continue
        hop = met(step, before)
        along = [parcel for parcel in step.give if parcel.peer in hop]
        apart = [parcel for parcel in step.give if parcel.peer not in hop]
        yield RankPhase(
            f"{name} step {index}",
            hop=messages((*step.forwarded, *along), rows.walk) + partials(before),
            fetches=tuple(messages(one.fetch.send, rows.stay_gathered) for one in step.rounds),
            tiles=tuple(one.tiles for one in step.rounds),
            leaves=tuple(messages(one.home.send, rows.stay_partial) for one in step.rounds),
            pass_on=tuple(messages(one.pass_on.send, rows.stay_gathered) for one in step.rounds),
            pass_back=tuple(messages(one.pass_back.send, rows.stay_partial) for one in step.rounds),
            gives=messages(apart, rows.walk),
        )
        before = step
    yield RankPhase(f"{name} home", partials(before))
