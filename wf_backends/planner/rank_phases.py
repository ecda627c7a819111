"""What one rank does in a pass, phase by phase: its messages with their bytes, and its tiles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from wf_backends.lowering import Parcel, RankProgram, Round, Step, area_in_vain, tile_area
from wf_backends.planner.workload import HeadSplit, PassKind

Messages = Sequence[tuple[int, int]]  # (peer, bytes)


@dataclass(frozen=True, slots=True)
class PhaseRound:
    """A round of a step: what is sent before and after its tiles (see lowering's `Round`)."""

    fetch: Messages = ()
    pass_on: Messages = ()
    seconds: float = 0.0
    """Of its tiles."""
    pass_back: Messages = ()
    home: Messages = ()


@dataclass(frozen=True, slots=True)
class RankPhase:
    """What one rank does in a phase: the hop goes on meanwhile, the rounds follow each other."""

    label: str
    hop: Messages = ()
    rounds: tuple[PhaseRound, ...] = ()


def rank_phases(program: RankProgram, split: HeadSplit, kind: PassKind) -> Iterator[RankPhase]:
    """Everything that one rank does in a pass, in order.

    The bytes are those of `message_bytes.bytes_sent`, and of the executor; there fetches count as
    gathering, and results that leave as sent home. A round takes scores * score_s + calls * call_s.
    """
    rows, score_s, rate = kind.row_bytes(split.shape), kind.seconds_per_score(split), split.rate

    def messages(parcels: Iterable[Parcel | None], row: int) -> Messages:
        sent = ((parcel.peer, parcel.num_rows * row) for parcel in parcels if parcel)
        return [(peer, num_bytes) for peer, num_bytes in sent if peer != program.rank and num_bytes]

    def partials(step: Step | None) -> Messages:
        if step is None:
            return []
        return messages((step.partial_out, *step.home_out), rows.walk.partial)

    def phase_round(one: Round) -> PhaseRound:
        scores = sum(tile_area(tile) + area_in_vain(tile, rate.diagonal_keys) for tile in one.tiles)
        return PhaseRound(
            messages(one.fetch.send, rows.stay.gathered),
            messages(one.pass_on.send, rows.stay.gathered),
            scores * score_s + len(one.tiles) * rate.call_s,
            messages(one.pass_back.send, rows.stay.partial),
            messages(one.home.send, rows.stay.partial),
        )

    yield RankPhase(f"{kind.name} gather", messages(program.walk.give, rows.walk.gathered))
    before, busy = None, set(program.busy)
    for index, step in enumerate(program.steps):
        phase = RankPhase(f"{kind.name} step {index}")
        if index in busy:
            hop = *messages((*step.forwarded, *step.give), rows.walk.row), *partials(before)
            phase = replace(phase, hop=hop, rounds=tuple(map(phase_round, step.rounds)))
        yield phase
        before = step
    yield RankPhase(f"{kind.name} home", partials(before))
