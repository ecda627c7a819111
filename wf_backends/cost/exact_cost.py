"""What a pass costs, message by message: from the programs that its ranks run.

cost/simulator.py computes how long the pass takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache

from wf_backends.cost.simulator import MessageSizes, PhaseRound, RankPhase, Simulator
from wf_backends.cost.ulysses import pipelined
from wf_backends.cost.workload import Cost, HeadSplit, PassKind
from wf_backends.lowering import (
    Parcel,
    Problem,
    RankProgram,
    Round,
    RowBytes,
    computed_area,
    lower,
)
from wf_backends.schedule import Schedule, make_layout


@lru_cache(maxsize=256)  # several plans of a request have a pass in common
def pass_cost(split: HeadSplit, schedule: Schedule, kind: PassKind, host_size: int = 1) -> Cost:
    """What a pass of a schedule costs, message by message, all ranks and all chunks of heads.

    Args:
        schedule: for split.route_size ranks; its rank i is group i of split.groups, whose members
            all do the same, each with its own heads.
        host_size: see `Placed`.
    """
    rows = kind.row_bytes(split.shape)
    problem = problem_of(split, schedule, kind, host_size)
    programs = [lower(problem, rank) for rank in range(split.route_size)]
    simulator = Simulator(split.topology, split.groups)
    phases_by_rank = (rank_phases(program, split, kind) for program in programs)
    for phase_of_all_ranks in zip(*phases_by_rank, strict=True):
        simulator.run(phase_of_all_ranks)
    memory, gathered = list[float](), list[float]()  # bytes, by rank
    gathers_stay, gathers_walk = kind.ordered(*schedule.gathers())
    for program in programs:
        stay, walk, steps = program.stay, program.walk, program.steps
        held_rows = stay.num_rows, max(step.num_rows for step in steps)
        shard_rows = stay.shard_rows, walk.shard_rows
        memory.append(buffer_bytes(shard_rows, held_rows, rows, arrive=len(steps) > 1))
        stay_bytes = stay.num_rows * rows.stay.row if gathers_stay else 0
        walk_bytes = walk.num_rows * rows.walk.row if gathers_walk else 0
        gathered.append(stay_bytes + walk_bytes)
    cost = replace(simulator.cost(), memory_bytes=max(memory), gathered_bytes=max(gathered))
    return pipelined(split, cost)


def problem_of(split: HeadSplit, schedule: Schedule, kind: PassKind, host_size: int = 1) -> Problem:
    """The problem that is lowered: a schedule over the split's sequence."""
    workload, size, mask = split.workload, split.topology.size, split.workload.mask
    layouts = (
        make_layout(workload.layout, size, length, mask.cu_seqlens or (0, length), mask.slices)
        for length in (workload.seqlen, workload.num_keys)
    )
    queries, keys = map(split.groups.merge, layouts)
    near = split.groups.groups_per_host(host_size)
    return Problem(schedule, queries, keys, mask, kind.queries_walk, kind.keep, near)


def buffer_bytes(
    shards: tuple[float, float], held: tuple[float, float], rows: RowBytes, arrive: bool = True
) -> float:
    """Bytes of a pass's buffers at their peak: the side that stays, walkers, and their results.

    In the backward also what stands in for outputs that are not on their own rank (see
    runtime/surrogate_out.py).

    Args:
        shards: rows of a rank's own shards, (of the side that stays, of the walkers).
        held: rows of the two buffers.
        arrive: whether the next walkers arrive while those of a step are computed.
    """
    stay, walk = held
    extra = shards[1] * rows.walk.summed
    if stay > shards[0]:
        extra += shards[0] * rows.stay.summed + stay * rows.stay.output
    stay_bytes = rows.stay.row + rows.stay.summed
    walk_bytes = (2 if arrive else 1) * (rows.walk.row + rows.walk.summed) + rows.walk.output
    return stay * stay_bytes + walk * walk_bytes + extra


def rank_phases(program: RankProgram, split: HeadSplit, kind: PassKind) -> Iterator[RankPhase]:
    """Everything that one rank does in a pass, in order.

    The bytes are those that the runtime sends, which counts fetches as gathering, and results of
    the side that stays as reducing. A round takes scores * score_s + calls * call_s.
    """
    rows, score_s, rate = kind.row_bytes(split.shape), kind.seconds_per_score(split), split.rate

    def messages(parcels: Iterable[Parcel], row_bytes: int) -> MessageSizes:
        sent = ((parcel.peer, parcel.num_rows * row_bytes) for parcel in parcels)
        return [(peer, num_bytes) for peer, num_bytes in sent if peer != program.rank and num_bytes]

    def phase_round(program_round: Round) -> PhaseRound:
        tiles = program_round.tiles
        scores = sum(computed_area(tile, rate.diagonal_keys) for tile in tiles)
        return PhaseRound(
            messages(program_round.fetch.send, rows.stay.gathered),
            messages(program_round.pass_on.send, rows.stay.gathered),
            scores * score_s + len(tiles) * rate.call_s,
            messages(program_round.pass_back.send, rows.stay.partial),
            messages(program_round.reduce.send, rows.stay.partial),
        )

    yield RankPhase(f"{kind.name} gather", messages(program.walk.send, rows.walk.gathered))
    busy = set(program.busy_steps)
    partials: MessageSizes = ()  # of the step before
    for index, step in enumerate(program.steps):
        phase = RankPhase(f"{kind.name} step {index}")
        if index in busy:
            forwarded = messages((*step.hop.send, *step.owner.send), rows.walk.row)
            rounds = tuple(map(phase_round, step.rounds))
            phase = replace(phase, hop=[*forwarded, *partials], rounds=rounds)
        yield phase
        partials = messages((*step.partial.send, *step.reduce.send), rows.walk.partial)
    yield RankPhase(f"{kind.name} reduce", partials)
