# pyright: reportUnnecessaryIsInstance=false
"""Which rank plays which part of a schedule.

Pure: standard library only. The ranks of a route are numbers with digits: of a mesh (column, row),
of concentric rings (block, position in the sub-ring, member of the team). Writing the digits in
another order, or counting backwards, puts other ranks on one host; a schedule with its ranks
renumbered is a schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations, product
from operator import mul
from typing import Any, cast

from wf_backends._validation import nearest
from wf_backends.schedule.routes import ROUTES, make_schedule
from wf_backends.schedule.schedule import Schedule, Shards, inverse

Words = tuple[tuple[str, Any], ...]  # a route without its placement, sorted and hashable
ORDER, REVERSE, HOST_SIZE = "order", "reverse", "host_size"  # a placement, as words of a route


@dataclass(frozen=True, slots=True)
class Placed:
    """A route by its words, and which rank plays which of its parts.

    Digit i of a part's number is worth more than digit i + 1; `order` lists the digits as they
    stand in the rank's number. `reverse` counts the ranks from the last to the first. `host_size`
    neighbouring ranks of the cluster are a host to which a row of the side that stays crosses once;
    1 = once to each reader.
    """

    words: Words
    order: tuple[int, ...]
    reverse: bool = False
    host_size: int = 1

    @property
    def route(self) -> dict[str, Any]:
        """The route as in the config, without its placement."""
        return dict(self.words)

    @property
    def keys_stay(self) -> bool:
        """Whether keys stay in its forward: see `RouteKind`."""
        return ROUTES[self.route["name"]].keys_stay

    @property
    def gathers(self) -> bool:
        """Whether ranks bring rows of several owners together: see `RouteKind`."""
        return ROUTES[self.route["name"]].gathers

    @property
    def in_order(self) -> bool:
        """Whether the digits stand in the route's own order."""
        return self.order == tuple(range(len(self.order)))

    @property
    def in_rank_order(self) -> bool:
        """Whether part r is played by rank r, as where a route says nothing of placement."""
        return self.in_order and not self.reverse

    def to_words(self) -> dict[str, Any]:
        """What `read_placed` takes, as a JSON has it; rank order goes without saying."""
        words = self.route
        if not self.in_order:
            words[ORDER] = list(self.order)
        words |= {REVERSE: True} if self.reverse else {}
        return words | ({HOST_SIZE: self.host_size} if self.host_size > 1 else {})

    def __str__(self) -> str:
        route = self.route
        keys = " ".join(f"{key}={value}" for key, value in route.items() if key != "name")
        text = f"{route['name']} {keys}".strip()
        if not self.in_order:
            text += f", digits {'-'.join(map(str, self.order))}"
        text += ", reversed" if self.reverse else ""
        return text + (f", once to hosts of {self.host_size}" if self.host_size > 1 else "")


def named_digits(route: Mapping[str, Any], n: int) -> dict[str, int]:
    """The digits of a route's parts, the most worthy first: what they count, and their sizes."""
    match route["name"]:
        case "double_ring":
            return {"outer": n // route["inner"], "inner": route["inner"]}
        case "mesh":
            return {"column": route["cols"], "row": route["rows"]}
        case "concentric":
            team = route["team_size"]
            return {"block": team, "place": n // team**2, "member": team}
        case _:
            return {"rank": n}


def digits(route: Mapping[str, Any], n: int) -> tuple[int, ...]:
    """The sizes of the digits of a route's parts, the most worthy first."""
    return tuple(named_digits(route, n).values())


def in_rank_order(route: Mapping[str, Any], n: int) -> Placed:
    """A route whose part r is played by rank r."""
    return Placed(tuple(sorted(route.items())), tuple(range(len(digits(route, n)))))


def read_placed(route: Mapping[str, Any], n: int, most: int | None = None) -> Placed:
    """A route for n ranks and its placement, in the words of a config.

    Args:
        route: such as {"name": "mesh", "rows": 2, "cols": 4, "order": [1, 0], "reverse": true}.
            "order" (default: rank order) lists the digits as they stand in a rank's number, the
            most worthy first; "reverse" (default: false) counts the ranks backwards; "host_size"
            (default: 1) as in `Placed`.
        most: the largest host_size, all ranks of a sequence; None = any.

    Raises:
        ValueError: if the route does not fit n ranks, naming its digits and their sizes if the
            order is none of them, or gathers nothing that could cross once.
    """
    placement = (ORDER, REVERSE, HOST_SIZE)
    words = {key: value for key, value in route.items() if key not in placement}
    of_routes = {key for kind in ROUTES.values() for key in kind.keys}
    for key in words.keys() - of_routes:
        if meant := nearest(key, placement):
            raise ValueError(f"no route takes {key!r}{meant}")
    make_schedule(words, n)  # refuses what does not fit
    plain, reverse = in_rank_order(words, n), route.get(REVERSE, False)
    if not isinstance(reverse, bool):
        raise ValueError(f"{REVERSE} must be true or false, got {reverse!r}")
    order = route.get(ORDER, plain.order)
    listed = tuple(cast(tuple[Any, ...], order)) if isinstance(order, list | tuple) else ()
    if any(type(at) is not int for at in listed) or sorted(listed) != list(plain.order):
        sizes = enumerate(named_digits(words, n).items())
        told = ", ".join(f"{at} = {name} (of {size})" for at, (name, size) in sizes)
        raise ValueError(
            f"{ORDER} must list every digit of route {words['name']!r} once, here {told}; "
            f"got {order!r}"
        )
    return Placed(plain.words, listed, reverse, _read_host_size(route, plain.gathers, most))


def _read_host_size(route: Mapping[str, Any], gathers: bool, most: int | None) -> int:
    size = route.get(HOST_SIZE, 1)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(
            f"{HOST_SIZE} must be a positive integer, the ranks of a host (1: rows cross once to "
            f"each reader), got {size!r}"
        )
    if size > 1 and not gathers:
        raise ValueError(
            f"{HOST_SIZE} {size} is for routes that bring rows of several ranks together; on route "
            f"{route['name']!r} a row is handed from rank to rank: leave {HOST_SIZE} out"
        )
    if most is not None and size > most:
        raise ValueError(f"{HOST_SIZE} must be at most {most}, all ranks of a sequence, got {size}")
    return size


def orders(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The orders of the digits that differ, the route's own first."""
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for order in permutations(range(len(sizes))):
        found.setdefault(tuple(digit for digit in order if sizes[digit] > 1), order)
    return list(found.values())


def strides(sizes: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """How far apart the ranks are that differ by one in digit i, for every i."""
    apart, stride = [1] * len(sizes), 1
    for digit in reversed(order):
        apart[digit] = stride
        stride *= sizes[digit]
    return tuple(apart)


def permutation(placed: Placed, n: int) -> tuple[int, ...]:
    """The rank that plays each part."""
    sizes = digits(placed.route, n)
    apart = strides(sizes, placed.order)
    ranks = (sum(map(mul, part, apart)) for part in product(*map(range, sizes)))
    return tuple(n - 1 - rank for rank in ranks) if placed.reverse else tuple(ranks)


def relabel(schedule: Schedule, ranks: tuple[int, ...]) -> Schedule:
    """The schedule in which rank `ranks[r]` (a permutation) plays the part of rank r."""
    parts = inverse(ranks)

    def moved(shards: tuple[Shards, ...]) -> tuple[Shards, ...]:
        return tuple(tuple(sorted(ranks[shard] for shard in shards[part])) for part in parts)

    hops = {hop: tuple(ranks[hop[part]] for part in parts) for hop in set(schedule.hops)}
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


@lru_cache(maxsize=64)  # forward and backward have the same
def placements(n: int) -> tuple[Placed, ...]:
    """Every route for n ranks with every order of its digits."""
    return tuple(
        replace(in_rank_order(route, n), order=order)
        for route in routes(n)
        for order in orders(digits(route, n))
    )
