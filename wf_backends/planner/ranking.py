"""Which of several plans is the best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from wf_backends.cluster import Topology
from wf_backends.planner.plan import PassPlan, Plan, Request
from wf_backends.planner.workload import Cost

TIE = 0.02  # times that differ by this share are equal: predictions are not more exact than that
DIGITS = 3  # of all figures that count

Found = TypeVar("Found", PassPlan, Plan)
Merits = tuple[float, ...]


def ranked(found: Sequence[Found], request: Request) -> list[Found]:
    """Plans, or plans of one pass, the best first.

    Those over the request's memory limit come last, by what they need; the others by time. Times
    within TIE of the fastest are equal. Of plans that are equally fast, the one comes first that
    sends fewer bytes through the busiest link, then the one that takes less memory, then the one of
    simpler words.

    Args:
        found: one at least.
    """
    return [one for _, one in _by_merit(found, request)]


def best_of(found: Sequence[Found], request: Request) -> list[Found]:
    """The first of `ranked` and all with the same figures, the simplest words first."""
    by_merit = _by_merit(found, request)
    return [one for merits, one in by_merit if merits == by_merit[0][0]]


def fastest_of(found: Sequence[Found], request: Request) -> Found:
    """The fastest that fits the memory limit; if none does, the one that takes least."""
    return min(found, key=lambda one: (_over(one.cost, request), one.cost.seconds))


def _over(cost: Cost, request: Request) -> float:
    """The bytes that a cost needs if they exceed the limit; else 0."""
    return cost.memory_bytes if cost.memory_bytes > request.memory_limit else 0.0


def _by_merit(found: Sequence[Found], request: Request) -> list[tuple[Merits, Found]]:
    equal_s = (1 + TIE) * fastest_of(found, request).cost.seconds

    def merits(cost: Cost) -> Merits:
        took = 0.0 if cost.seconds <= equal_s else rounded(cost.seconds)
        _, link_s, _ = busiest_link(cost, request.topology)
        return _over(cost, request), took, rounded(link_s), rounded(cost.memory_bytes)

    pairs = [(merits(one.cost), one) for one in found]
    return sorted(pairs, key=lambda pair: (pair[0], pair[1].complexity))


def busiest_link(cost: Cost, topology: Topology) -> tuple[str, float, float]:
    """(its name, seconds, bytes) of the kind of link that is busy for longer.

    seconds = bytes / rate
    """
    nic_s = cost.nic_bytes / topology.between.bytes_per_s
    inside_s = cost.inside_bytes / topology.inside.bytes_per_s
    if nic_s > inside_s:
        return "the busiest NIC", nic_s, cost.nic_bytes
    return "the busiest link inside a host", inside_s, cost.inside_bytes


def rounded(value: float) -> float:
    """A figure to the digits that count."""
    return float(f"{value:.{DIGITS}g}")
