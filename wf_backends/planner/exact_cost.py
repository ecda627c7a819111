"""What a pass costs, message by message: from the programs that its ranks run.

How long it takes is told by planner/simulator.py.
"""

from __future__ import annotations

from wf_backends.lowering import Problem, RankProgram, RowBytes, lower
from wf_backends.planner.rank_phases import rank_phases
from wf_backends.planner.simulator import Simulator
from wf_backends.planner.ulysses_cost import pipelined
from wf_backends.planner.workload import Cost, HeadSplit, PassKind
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
        if any(one.hop or one.rounds for one in ranks):
            simulator.run(ranks)
    gathers = kind.ordered(*schedule.gathers())
    memory = max(_program_bytes(one, rows) for one in programs)
    gathered = max(_gathered_bytes(one, gathers, rows) for one in programs)
    return pipelined(split, simulator.cost(memory, gathered))


def problem_of(split: HeadSplit, schedule: Schedule, kind: PassKind, host_size: int = 1) -> Problem:
    """The schedule over the split's sequence."""
    work, size, mask = split.workload, split.topology.size, split.workload.mask
    queries, keys = (
        split.groups.merge(
            make_layout(work.layout, size, rows, mask.cu_seqlens or (0, rows), mask.slices)
        )
        for rows in (work.seqlen, work.num_keys)
    )
    near = split.groups.on_host(host_size)
    return Problem(schedule, queries, keys, mask, kind.queries_walk, kind.keep, near)


def buffer_bytes(shards: tuple[float, float], held: tuple[float, float], rows: RowBytes) -> float:
    """Buffers of a pass at their peak: what stays and its results, and walkers held and arriving.

    In the backward also what stands in for outputs that are not on their own rank (see
    runtime/surrogate_out.py).

    Args:
        shards: rows of a rank's own shards, (stay, walk). held: rows of the two buffers.
    """
    stay, walk = held
    beside = shards[1] * rows.walk.summed
    if stay > shards[0]:
        beside += shards[0] * rows.stay.summed + stay * rows.stay.output
    staying, walking = rows.stay.row + rows.stay.summed, rows.walk.row + rows.walk.summed
    return stay * staying + walk * (2 * walking + rows.walk.output) + beside


def _program_bytes(program: RankProgram, rows: RowBytes) -> float:
    held = program.stay.num_rows, max(step.num_rows for step in program.steps)
    return buffer_bytes((program.stay.shard_rows, program.walk.shard_rows), held, rows)


def _gathered_bytes(program: RankProgram, gathers: tuple[bool, bool], rows: RowBytes) -> int:
    """The buffers of the sides (stay, walk) that hold more than the rank's own."""
    stay, walk = program.stay.num_rows * rows.stay.row, program.walk.num_rows * rows.walk.row
    return gathers[0] * stay + gathers[1] * walk
