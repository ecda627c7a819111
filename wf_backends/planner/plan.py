"""Plans as data: what is asked, what is found, and which of several is the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from wf_backends.cluster import Topology
from wf_backends.cost import Cost, PassKind, Workload
from wf_backends.schedule import Placed, Schedule, place

MOVES = ("keys", "queries")  # which side walks in a backward
EXACT_UP_TO = 8  # ranks up to which every message is counted, by default
TIE = 0.02  # times that differ by this share are equal: predictions are not more exact than that
DIGITS = 3  # of all figures that count


@dataclass(frozen=True, slots=True)
class Request:
    """The question to the planner: cluster, workload, and what may be chosen."""

    topology: Topology
    workload: Workload
    memory_bytes: float | None = None
    """What attention may take of a rank's memory beyond its inputs; None = the topology's."""
    degrees: tuple[int, ...] | None = None
    """The ulysses degrees to look at; None = all that the ranks and heads allow."""
    strides: tuple[int, ...] | None = None
    """How far apart the ranks may be that trade heads for tokens; None = 1, one host, or all."""
    chunks: tuple[int, ...] | None = None
    """In how many chunks a rank's heads may be traded; None = all numbers that the heads allow."""
    forward: tuple[Placed, ...] | None = None
    """The forward routes to look at; None = all. They fit every degree looked at."""
    backward: tuple[Placed, ...] | None = None
    moves: tuple[str, ...] = MOVES
    """Which sides may walk in the backward."""
    keeps: tuple[bool, ...] = (False,)
    """Whether what the forward gathers may be kept for the backward: then both take one route."""
    layers: int = 1
    """Attention layers that keep it at the same time."""
    exact_up_to: int = EXACT_UP_TO
    """Ranks up to which every message is counted; beyond, closed forms price a pass."""

    @property
    def is_exact(self) -> bool:
        return self.topology.size <= self.exact_up_to

    @property
    def memory_limit(self) -> float:
        return self.topology.memory_bytes if self.memory_bytes is None else self.memory_bytes


@dataclass(frozen=True, slots=True)
class PassPlan:
    """One pass: its route, who plays which part, which side walks, and what it costs."""

    placed: Placed
    kind: PassKind
    cost: Cost

    @property
    def complexity(self) -> tuple[float, ...]:
        """A sort key, less for simpler words."""
        return _complexity(self.placed, self.kind.queries_walk)


def _complexity(placed: Placed, queries_walk: bool) -> tuple[float, ...]:
    """A pass by its words: rank order, few keys, keys that move."""
    return not placed.in_rank_order, placed.host_size, len(placed.words), queries_walk


@dataclass(frozen=True, slots=True)
class Choice:
    """What is run: the head split, both routes as they are placed, and which side walks back."""

    degree: int
    forward: Placed
    backward: Placed
    moves: str = "keys"
    keep: bool = False
    stride: int = 1
    """How far apart the ranks are that trade heads for tokens."""
    chunks: int = 1
    """In how many chunks these heads are traded, one while another is computed."""

    @property
    def split(self) -> str:
        """The head split in words."""
        words = [str(self.degree)]
        words += [f"{self.stride} apart"] if self.stride > 1 else []
        words += [f"{self.chunks} chunks"] if self.chunks > 1 else []
        return ", ".join(words)

    @property
    def in_rank_order(self) -> bool:
        return self.stride == 1 and self.forward.in_rank_order and self.backward.in_rank_order

    @property
    def complexity(self) -> tuple[float, ...]:
        """A sort key, less for simpler words: one scheme in both passes before a mixture."""
        mixed = self.forward != self.backward, not self.in_rank_order
        passes = _complexity(self.forward, self.forward.keys_stay)
        passes += _complexity(self.backward, self.moves == MOVES[1])
        return *mixed, self.stride, self.chunks, self.keep, self.degree, *passes

    def schedules(self, size: int) -> tuple[Schedule, Schedule]:
        """(forward, backward) for `size` ranks, each of the route's being `degree` of them."""
        size //= self.degree
        forward = place(self.forward, size)
        return forward, forward if self.backward == self.forward else place(self.backward, size)

    def to_config(self, size: int, layout: str) -> dict[str, Any]:
        """The words of the config that runs this and nothing else."""
        words = {
            "sequence_parallel_size": size,
            "route": self.forward.to_words(),
            "backward_route": self.backward.to_words(),
            "backward_moves": self.moves,
            "ulysses_degree": self.degree,
            "layout": layout,
        }
        words |= {"ulysses_stride": self.stride} if self.stride > 1 else {}
        words |= {"ulysses_chunks": self.chunks} if self.chunks > 1 else {}
        return words | {"keep_gathered": True} if self.keep else words


@dataclass(frozen=True)
class Plan:
    """A whole way to run attention, forward and backward, and what it costs."""

    choice: Choice
    forward: Cost
    backward: Cost
    """Costs of all chunks of heads."""
    around: Cost
    """The ranks' agreement, and trading heads for tokens in both passes."""
    layers: int = 1
    """How many keep what the forward gathers, if the backward uses it."""

    @cached_property  # plans are compared by it
    def cost(self) -> Cost:
        total = self.around + self.forward + self.backward
        memory = self.around.memory_bytes
        memory += max(self.forward.memory_bytes, self.backward.memory_bytes)
        memory += self.layers * self.forward.gathered_bytes if self.choice.keep else 0.0
        return replace(total, memory_bytes=memory)

    @property
    def complexity(self) -> tuple[float, ...]:
        return self.choice.complexity


Found = TypeVar("Found", PassPlan, Plan)


def ranked(found: Sequence[Found], request: Request) -> list[Found]:
    """Plans, or plans of one pass, the best first.

    Those over the request's memory limit come last, by what they need; the others by time. Times
    within TIE of the fastest are equal. Of plans that are equally fast, the one comes first that
    sends fewer bytes through the busiest link, then the one that takes less memory, then the one of
    simpler words.

    Args:
        found: one at least.
    """
    equal_s = (1 + TIE) * fastest_of(found, request).cost.seconds

    def merits(one: Found) -> tuple[float, ...]:
        cost = one.cost
        took = 0.0 if cost.seconds <= equal_s else rounded(cost.seconds)
        _, link_s, _ = busiest_link(cost, request.topology)
        figures = _over(cost, request), took, rounded(link_s), rounded(cost.memory_bytes)
        return *figures, *one.complexity

    return sorted(found, key=merits)


def fastest_of(found: Sequence[Found], request: Request) -> Found:
    """The fastest that fits the memory limit; if none does, the one that takes least."""
    return min(found, key=lambda one: (_over(one.cost, request), one.cost.seconds))


def _over(cost: Cost, request: Request) -> float:
    """The bytes that a cost needs if they exceed the limit; else 0."""
    return cost.memory_bytes if cost.memory_bytes > request.memory_limit else 0.0


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
