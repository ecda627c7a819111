"""Which rank plays which part of a schedule.

Pure: standard library only. The ranks of a route are numbers with digits: of a mesh (column, row),
of concentric rings (block, position in the sub-ring, member of the team). Writing the digits in
another order, or counting backwards, puts other ranks on one host; a schedule with its ranks
renumbered is a schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations
from math import prod
from typing import Any

from wf_backends.schedule import Hop, Schedule, make_schedule

Words = tuple[tuple[str, Any], ...]  # a route as in the config, sorted and hashable


@dataclass(frozen=True, slots=True)
class Placed:
    """A route by its words, and which rank plays which of its parts.

    Digit i of a part's number is worth more than digit i + 1; `order` lists the digits as they
    stand in the rank's number. `reverse` counts the ranks from the last to the first.
    """

    words: Words
    order: tuple[int, ...]
    reverse: bool = False

    @property
    def route(self) -> dict[str, Any]:
        """The route as in the config."""
        return dict(self.words)

    @property
    def in_rank_order(self) -> bool:
        """Whether part r is played by rank r, as where a config names the route."""
        return self.order == tuple(range(len(self.order))) and not self.reverse

    def __str__(self) -> str:
        route = self.route
        keys = " ".join(f"{key}={value}" for key, value in route.items() if key != "name")
        text = f"{route['name']} {keys}".strip()
        if self.order != tuple(range(len(self.order))):
            text += f", digits {'-'.join(map(str, self.order))}"
        return f"{text}, reversed" if self.reverse else text


def digits(route: Mapping[str, Any], n: int) -> tuple[int, ...]:
    """The sizes of the digits of a route's parts, the most worthy first."""
    match route["name"]:
        case "double_ring":
            return n // route["inner"], route["inner"]
        case "mesh":
            return route["cols"], route["rows"]
        case "concentric":
            team = route["team_size"]
            return team, n // team**2, team
        case _:
            return (n,)


def orders(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The orders of the digits that differ, the route's own first."""
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for order in permutations(range(len(sizes))):
        found.setdefault(tuple(digit for digit in order if sizes[digit] > 1), order)
    return list(found.values())


def strides(sizes: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """How far apart the ranks are that differ by one in digit i, for every i."""
    apart = {digit: prod(sizes[d] for d in order[at + 1 :]) for at, digit in enumerate(order)}
    return tuple(apart[digit] for digit in range(len(sizes)))


def permutation(placed: Placed, n: int) -> tuple[int, ...]:
    """The rank that plays each part."""
    sizes = digits(placed.route, n)
    worth = strides(sizes, tuple(range(len(sizes))))
    apart = strides(sizes, placed.order)
    ranks = [
        sum(part // w % s * a for w, s, a in zip(worth, sizes, apart, strict=True))
        for part in range(n)
    ]
    return tuple(n - 1 - rank for rank in ranks) if placed.reverse else tuple(ranks)


def relabel(schedule: Schedule, ranks: tuple[int, ...]) -> Schedule:
    """The schedule in which rank `ranks[r]` plays the part of rank r, shards and all.

    Raises:
        ValueError: if `ranks` is no permutation of the schedule's ranks.
    """
    n = schedule.num_ranks
    if sorted(ranks) != list(range(n)):
        raise ValueError(f"ranks must be a permutation of the {n} ranks, got {ranks}")
    part = {rank: at for at, rank in enumerate(ranks)}

    def moved(shards: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sorted(ranks[s] for s in shards[part[r]])) for r in range(n))

    hops: dict[Hop, Hop] = {
        hop: tuple(ranks[hop[part[r]]] for r in range(n)) for hop in set(schedule.hops)
    }
    return Schedule(
        moved(schedule.q), moved(schedule.kv), tuple(hops[hop] for hop in schedule.hops)
    )


def place(placed: Placed, n: int) -> Schedule:
    """The schedule of a route for n ranks, its parts given to ranks."""
    schedule = make_schedule(placed.route, n)
    return schedule if placed.in_rank_order else relabel(schedule, permutation(placed, n))


def divisors(n: int) -> list[int]:
    """All divisors of n, rising."""
    low = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]


def routes(n: int) -> list[dict[str, Any]]:
    """Every route for n ranks that is no other one by another name, the simplest first."""
    inner = [d for d in divisors(n) if 1 < d < n]
    found: list[dict[str, Any]] = [{"name": "ring"}]
    if n == 1:
        return found
    found.append({"name": "all_gather"})
    found += [{"name": "double_ring", "inner": d} for d in inner]
    found += [{"name": "mesh", "rows": d, "cols": n // d} for d in (*inner, n)]
    teams = [c for c in divisors(n) if c > 1 and n % (c * c) == 0]
    return found + [{"name": "concentric", "team_size": c} for c in teams]


def placements(n: int, directed: bool) -> list[Placed]:
    """Every route for n ranks with every order of its digits.

    Args:
        directed: also count the ranks backwards, which changes nothing unless the mask tells
            earlier from later.
    """
    found: list[Placed] = []
    for route in routes(n):
        words = tuple(sorted(route.items()))
        for order in orders(digits(route, n)):
            found += [
                Placed(words, order, back) for back in ((False, True) if directed else (False,))
            ]
    return found
