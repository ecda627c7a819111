"""In which direction walkers hop. Pure: standard library only."""

from __future__ import annotations

from wf_backends.schedule import Mask, Schedule


def nearest_first(schedule: Schedule, mask: Mask) -> Schedule:
    """The same meetings, under a sliding window the near ones of either direction in a row.

    Under a window a shard is read by ranks next to its own: of a zigzag shard the first chunk by
    those after it, the last chunk by those before. Half of the hops are taken as they are; then
    one jump leads to the neighbour on the other side of where the keys began, and the other hops
    go on from there. In between, few ranks or none read anything, and a row crosses from host to
    host once. Schedules whose hops differ stay as they are.
    """
    ranks, steps = range(schedule.num_ranks), schedule.num_steps
    if mask.band.edges < 2 or steps < 3 or schedule.has_laps:
        return schedule

    def move(hops: int) -> tuple[int, ...]:
        return tuple(schedule.place(hops, rank) for rank in ranks)

    if move(steps) != tuple(ranks):  # walkers do not come round
        return schedule
    ahead = steps // 2
    behind = steps - ahead - 1
    hops = (schedule.hops[0],) * ahead + (move(behind),) + (move(steps - 1),) * (behind - 1)
    return Schedule(schedule.q, schedule.kv, hops)
