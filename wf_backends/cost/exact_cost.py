"""What a pass costs, message by message: from the programs that its ranks run.

How long it takes is told by cost/simulator.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from wf_backends.cost.simulator import Messages, PhaseRound, RankPhase, Simulator
from wf_backends.cost.ulysses import pipelined
from wf_backends.cost.workload import Cost, HeadSplit, PassKind
from wf_backends.lowering import (
    Parcel,
    Problem,
    RankProgram,
    Round,
    RowBytes,
    Step,
    lower,
    tile_area,
    wasted_area,
)
from wf_backends.schedule import Schedule, make_layout


def pass_cost(split: HeadSplit, schedule: Schedule, kind: PassKind, host_size: int = 1) -> Cost:
    """What a pass of a schedule costs, message by message, all ranks and all chunks of heads.

    Args:
        schedule: for split.route_size ranks; rank i of it is group i of split.groups, whose members
            all do the same with other heads.
        host_size: see `Placed`.
    """
    rows = kind.row_bytes(split.shape)
    problem = problem_of(split, schedule, kind, host_size)
    programs = [lower(problem, rank) for rank in range(split.route_size)]
    simulator = Simulator(split.topology, split.groups)
    for ranks in zip(*(rank_phases(one, split, kind) for one in programs), strict=True):
        simulator.run(ranks)
    memory, gathered = list[float](), list[float]()
    gathers_stay, gathers_walk = kind.ordered(*schedule.gathers())
    for stay, walk, steps in ((one.stay, one.walk, one.steps) for one in programs):
        held = stay.num_rows, max(step.num_rows for step in steps)
        shards = stay.shard_rows, walk.shard_rows
        memory.append(buffer_bytes(shards, held, rows, arrive=len(steps) > 1))
        staying, walking = gathers_stay * stay.num_rows, gathers_walk * walk.num_rows
        gathered.append(staying * rows.stay.row + walking * rows.walk.row)
    return pipelined(split, simulator.cost(max(memory), max(gathered)))


def problem_of(split: HeadSplit, schedule: Schedule, kind: PassKind, host_size: int = 1) -> Problem:
    """The schedule over the split's sequence."""
    work, size, mask = split.workload, split.topology.size, split.workload.mask
    queries, keys = (
        split.groups.merge(
            make_layout(work.layout, size, rows, mask.cu_seqlens or (0, rows), mask.slices)
        )
        for rows in (work.seqlen, work.num_keys)
    )
    near = split.groups.groups_per_host(host_size)
    return Problem(schedule, queries, keys, mask, kind.queries_walk, kind.keep, near)


def buffer_bytes(
    shards: tuple[float, float], held: tuple[float, float], rows: RowBytes, arrive: bool = True
) -> float:
    """Buffers of a pass at their peak: what stays and its results, and walkers held and arriving.

    In the backward also what stands in for outputs that are not on their own rank (see
    runtime/surrogate_out.py).

    Args:
        shards: rows of a rank's own shards, (stay, walk). held: rows of the two buffers.
        arrive: whether the next walkers arrive while those of a step are computed.
    """
    stay, walk = held
    beside = shards[1] * rows.walk.summed
    if stay > shards[0]:
        beside += shards[0] * rows.stay.summed + stay * rows.stay.output
    staying, walking = rows.stay.row + rows.stay.summed, rows.walk.row + rows.walk.summed
    return stay * staying + walk * ((1 + arrive) * walking + rows.walk.output) + beside


def rank_phases(program: RankProgram, split: HeadSplit, kind: PassKind) -> Iterator[RankPhase]:
    """Everything that one rank does in a pass, in order.

    The bytes are those of `message_bytes.bytes_sent`, and of the executor; there fetches count as
    gathering, and results that leave as sent home. A round takes scores * score_s + calls * call_s.
    """
    rows, score_s, rate = kind.row_bytes(split.shape), kind.seconds_per_score(split), split.rate

    def messages(parcels: Iterable[Parcel], row: int) -> Messages:
        sent = ((parcel.peer, parcel.num_rows * row) for parcel in parcels)
        return [(peer, num_bytes) for peer, num_bytes in sent if peer != program.rank and num_bytes]

    def partials(step: Step | None) -> Messages:
        if step is None:
            return []
        return messages((*step.partial_out, *step.home_out), rows.walk.partial)

    def phase_round(one: Round) -> PhaseRound:
        scores = sum(tile_area(tile) + wasted_area(tile, rate.diagonal_keys) for tile in one.tiles)
        return PhaseRound(
            messages(one.fetch.send, rows.stay.gathered),
            messages(one.pass_on.send, rows.stay.gathered),
            scores * score_s + len(one.tiles) * rate.call_s,
            messages(one.pass_back.send, rows.stay.partial),
            messages(one.home.send, rows.stay.partial),
        )

    yield RankPhase(f"{kind.name} gather", messages(program.walk.send, rows.walk.gathered))
    before, busy = None, set(program.busy_steps)
    for index, step in enumerate(program.steps):
        phase = RankPhase(f"{kind.name} step {index}")
        if index in busy:
            hop = *messages((*step.hop_out, *step.owner_out), rows.walk.row), *partials(before)
            phase = replace(phase, hop=hop, rounds=tuple(map(phase_round, step.rounds)))
        yield phase
        before = step
    yield RankPhase(f"{kind.name} home", partials(before))
