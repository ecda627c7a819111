"""Requests and plans as data, and how plans are ranked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from wf_backends.cluster import Topology
from wf_backends.cost import Cost, PassKind, Workload
from wf_backends.schedule import Placed, Schedule, place

MOVES = (KEYS, QUERIES) = ("keys", "queries")  # which side walks in a backward
EXACT_UP_TO = 8  # ranks up to which every message is counted, by default
TIE = 0.02  # times that differ by this share are equal: predictions are not more exact than that
SIGNIFICANT_DIGITS = 3  # of all figures by which plans are compared


@dataclass(frozen=True, slots=True)
class Request:
    """What the planner is asked: cluster, workload, and what may be chosen."""

    topology: Topology
    workload: Workload
    memory_bytes: float | None = None
    """Memory of a rank that attention may use beyond its inputs; None = all of the topology's."""
    degrees: tuple[int, ...] | None = None
    """The ulysses degrees to look at; None = all that the ranks and heads allow."""
    strides: tuple[int, ...] | None = None
    """How far apart the ranks of a Ulysses group may be; None = 1, one host, or all ranks."""
    chunks: tuple[int, ...] | None = None
    """In how many chunks a rank's heads may be exchanged; None = all that the heads allow."""
    forward: tuple[Placed, ...] | None = None
    """The forward routes to look at; None = all. They fit every degree that is looked at."""
    backward: tuple[Placed, ...] | None = None
    moves: tuple[str, ...] = MOVES
    """Which sides may walk in the backward."""
    keeps: tuple[bool, ...] = (False,)
    """Whether what the forward gathers may be kept for the backward: both then take one route."""
    layers: int = 1
    """Attention layers that keep gathered rows at the same time."""
    exact_up_to: int = EXACT_UP_TO
    """Ranks up to which every message is counted; closed forms price a pass of more ranks."""

    @property
    def is_exact(self) -> bool:
        return self.topology.size <= self.exact_up_to

    @property
    def memory_limit(self) -> float:
        return self.topology.memory_bytes if self.memory_bytes is None else self.memory_bytes


@dataclass(frozen=True, slots=True)
class PassPlan:
    """The plan of one pass: its route and placement, which side walks, and what it costs."""

    placed: Placed
    kind: PassKind
    cost: Cost

    @property
    def moves(self) -> str:
        """Which side walks, one of MOVES."""
        return QUERIES if self.kind.queries_walk else KEYS

    @property
    def complexity(self) -> tuple[float, ...]:
        """A sort key, smaller for a pass with a shorter config."""
        return _complexity(self.placed, self.kind.queries_walk)


def _complexity(placed: Placed, queries_walk: bool) -> tuple[float, ...]:
    """A sort key: simple are rank order, no host_size, few fields, and keys that walk."""
    return not placed.in_rank_order, placed.host_size, len(placed.fields), queries_walk


@dataclass(frozen=True, slots=True)
class Choice:
    """What is run: head split, routes and placements, and which side walks in the backward."""

    degree: int
    forward: Placed
    backward: Placed
    moves: str = "keys"
    keep: bool = False
    stride: int = 1
    """How far apart the ranks are that exchange heads for tokens."""
    chunks: int = 1
    """In how many chunks a rank's heads are exchanged, one while another is computed."""

    @property
    def in_rank_order(self) -> bool:
        return self.stride == 1 and self.forward.in_rank_order and self.backward.in_rank_order

    @property
    def complexity(self) -> tuple[float, ...]:
        """A sort key: simple are one scheme in both passes, rank order, and few keys."""
        mixed = self.forward != self.backward, not self.in_rank_order
        forward = _complexity(self.forward, self.forward.keys_stay)
        backward = _complexity(self.backward, self.moves == QUERIES)
        return *mixed, self.stride, self.chunks, self.keep, self.degree, *forward, *backward

    def schedules(self, size: int) -> tuple[Schedule, Schedule]:
        """(forward, backward) for `size` ranks; a rank of the route is `degree` of them."""
        route_size = size // self.degree
        forward = place(self.forward, route_size)
        if self.backward == self.forward:
            return forward, forward
        return forward, place(self.backward, route_size)

    def to_config(self, size: int, layout: str) -> dict[str, Any]:
        """The keys and values of a config that runs exactly this choice."""
        config = {
            "sequence_parallel_size": size,
            "route": self.forward.to_dict(),
            "backward_route": self.backward.to_dict(),
            "backward_moves": self.moves,
            "ulysses_degree": self.degree,
            "layout": layout,
        }
        config |= {"ulysses_stride": self.stride} if self.stride > 1 else {}
        config |= {"ulysses_chunks": self.chunks} if self.chunks > 1 else {}
        return config | {"keep_gathered": True} if self.keep else config


@dataclass(frozen=True)
class Plan:
    """A whole way to run attention, forward and backward, and what it costs."""

    choice: Choice
    forward: Cost
    backward: Cost
    """Each the cost of all chunks of heads."""
    around: Cost
    """Exchanging heads for tokens in both passes."""
    layers: int = 1
    """How many layers keep what the forward gathers, if the backward uses it."""

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


AnyPlan = TypeVar("AnyPlan", PassPlan, Plan)


def ranked(plans: Sequence[AnyPlan], request: Request) -> list[AnyPlan]:
    """The plans, or plans of one pass, the best first.

    Plans over the request's memory limit come last, ordered by the memory that they need. The
    others are ordered by time. Times within TIE of the fastest are equal; equally fast plans are
    ordered by the bytes through the busiest link, then by memory, then by `complexity`.

    Args:
        plans: at least one.
    """
    equal_s = (1 + TIE) * fastest_of(plans, request).cost.seconds

    def sort_key(plan: AnyPlan) -> tuple[float, ...]:
        cost = plan.cost
        seconds = 0.0 if cost.seconds <= equal_s else rounded(cost.seconds)
        _, link_s, _ = busiest_link(cost, request.topology)
        figures = seconds, rounded(link_s), rounded(cost.memory_bytes)
        return _bytes_if_over_limit(cost, request), *figures, *plan.complexity

    return sorted(plans, key=sort_key)


def fastest_of(plans: Sequence[AnyPlan], request: Request) -> AnyPlan:
    """The fastest plan that fits the memory limit; if none does, the one that needs least."""
    return min(plans, key=lambda p: (_bytes_if_over_limit(p.cost, request), p.cost.seconds))


def _bytes_if_over_limit(cost: Cost, request: Request) -> float:
    """The memory that a plan of this cost needs if that exceeds the limit; else 0."""
    return cost.memory_bytes if cost.memory_bytes > request.memory_limit else 0.0


def busiest_link(cost: Cost, topology: Topology) -> tuple[str, float, float]:
    """(name, seconds, bytes) of the busier link, of a NIC and a rank's link inside its host.

    seconds = bytes / rate
    """
    nic_s = cost.nic_bytes / topology.between.bytes_per_s
    inside_s = cost.inside_bytes / topology.inside.bytes_per_s
    if nic_s > inside_s:
        return "the busiest NIC", nic_s, cost.nic_bytes
    return "the busiest link inside a host", inside_s, cost.inside_bytes


def rounded(value: float) -> float:
    """A figure, rounded to SIGNIFICANT_DIGITS."""
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
