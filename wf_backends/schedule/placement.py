# pyright: reportUnnecessaryIsInstance=false
"""Which rank plays which part of a schedule.

The parts of a route are numbers with digits: (column, row) of a mesh, (block, position in the
sub-ring, member of the team) of concentric rings. A rank's number has the same digits in any order.
This decides which parts share a host. A schedule with its ranks renumbered is still a valid
schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations, product
from operator import mul
from typing import Any, cast

from wf_backends._validation import positive
from wf_backends.schedule.routes import HOST_SIZE, ORDER, ROUTES, make_schedule
from wf_backends.schedule.schedule import Schedule, Shards, inverse


@dataclass(frozen=True, slots=True)
class Placed:
    """A route as in the config, and which rank plays which of its parts.

    Digit 0 of a part's number is the most significant. `order` lists the digits as they stand in
    the rank's number. `host_size` neighbouring ranks of the cluster share a host, to which a row of
    the side that stays crosses once; 1 = once to each reader.
    """

    fields: tuple[tuple[str, Any], ...]
    """The route without its placement, sorted and hashable."""
    order: tuple[int, ...]
    host_size: int = 1

    @property
    def route(self) -> dict[str, Any]:
        """The route as in the config, without its placement."""
        return dict(self.fields)

    @property
    def keys_stay(self) -> bool:
        """Whether keys are the side that stays in the forward: see `RouteKind`."""
        return ROUTES[self.route["name"]].keys_stay

    @property
    def in_rank_order(self) -> bool:
        """Whether rank r plays part r: the default, if a config has no "order"."""
        return self.order == tuple(range(len(self.order)))

    def to_dict(self) -> dict[str, Any]:
        """The route as a JSON block that `read_placed` reads; defaults are left out."""
        block = self.route
        if not self.in_rank_order:
            block[ORDER] = list(self.order)
        if self.host_size > 1:
            block[HOST_SIZE] = self.host_size
        return block

    def __str__(self) -> str:
        route = self.route
        keys = " ".join(f"{key}={value}" for key, value in route.items() if key != "name")
        text = f"{route['name']} {keys}".strip()
        if not self.in_rank_order:
            text += f", digits {'-'.join(map(str, self.order))}"
        if self.host_size > 1:
            text += f", once to hosts of {self.host_size}"
        return text


def named_digits(route: Mapping[str, Any], n: int) -> dict[str, int]:
    """Digit name -> size (how many values it has), the most significant digit first."""
    match route["name"]:
        case "double_ring":
            return {"outer": n // route["inner"], "inner": route["inner"]}
        case "mesh":
            return {"column": route["cols"], "row": route["rows"]}
        case "concentric":
            team = route["team_size"]
            return {"block": team, "position": n // team**2, "member": team}
        case _:
            return {"rank": n}


def digits(route: Mapping[str, Any], n: int) -> tuple[int, ...]:
    """The sizes of the digits of a route's parts, the most significant first."""
    return tuple(named_digits(route, n).values())


def default_placement(route: Mapping[str, Any], n: int) -> Placed:
    """The placement in which rank r plays part r of the route."""
    return Placed(tuple(sorted(route.items())), tuple(range(len(digits(route, n)))))


def read_placed(route: Mapping[str, Any], n: int, max_host_size: int | None = None) -> Placed:
    """A route for n ranks and its placement, from a config.

    Args:
        route: such as {"name": "mesh", "rows": 2, "cols": 4, "order": [1, 0]}. For "order" and
            "host_size" see `Placed`; they may be missing.
        max_host_size: the number of ranks that share a sequence; None = no limit.

    Raises:
        ValueError: if the route does not fit n ranks, if "order" does not list all digits (names
            them and their sizes), or if a route that gathers nothing has a "host_size" > 1.
    """
    named = {key: value for key, value in route.items() if key not in (ORDER, HOST_SIZE)}
    schedule = make_schedule(named, n)  # refuses what does not fit
    plain = default_placement(named, n)
    order = route.get(ORDER, plain.order)
    listed = tuple(cast(tuple[Any, ...], order)) if isinstance(order, list | tuple) else ()
    if any(type(digit) is not int for digit in listed) or sorted(listed) != list(plain.order):
        sizes = enumerate(named_digits(named, n).items())
        expected = ", ".join(f"{i} = {name} (of {size})" for i, (name, size) in sizes)
        raise ValueError(
            f"{ORDER} must list every digit of route {named['name']!r} once, here {expected}; "
            f"got {order!r}"
        )
    host_size = _read_host_size(route, schedule, max_host_size)
    return Placed(plain.fields, listed, host_size)


def _read_host_size(route: Mapping[str, Any], schedule: Schedule, max_size: int | None) -> int:
    size: Any = route.get(HOST_SIZE, 1)
    positive(HOST_SIZE, size)
    if size > 1 and not any(schedule.gathers()):
        raise ValueError(
            f"{HOST_SIZE} {size} is for routes that gather rows of several ranks; route "
            f"{route['name']!r} on {schedule.num_ranks} ranks gathers none: leave {HOST_SIZE} out"
        )
    if max_size is not None and size > max_size:
        raise ValueError(
            f"{HOST_SIZE} must be at most {max_size}, all ranks of a sequence, got {size}"
        )
    return size


def orders(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """All orders of the digits that place ranks differently, the route's own order first."""
    distinct: dict[tuple[int, ...], tuple[int, ...]] = {}
    for order in permutations(range(len(sizes))):
        distinct.setdefault(tuple(digit for digit in order if sizes[digit] > 1), order)
    return list(distinct.values())


def strides(sizes: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """For each digit i, the distance of two ranks whose parts differ by one in digit i."""
    by_digit, stride = [1] * len(sizes), 1
    for digit in reversed(order):
        by_digit[digit] = stride
        stride *= sizes[digit]
    return tuple(by_digit)


def permutation(placed: Placed, n: int) -> tuple[int, ...]:
    """[part] -> the rank that plays it."""
    sizes = digits(placed.route, n)
    digit_strides = strides(sizes, placed.order)
    return tuple(sum(map(mul, part, digit_strides)) for part in product(*map(range, sizes)))


def relabel(schedule: Schedule, ranks: tuple[int, ...]) -> Schedule:
    """The schedule in which rank `ranks[r]` (a permutation) does what rank r did."""
    parts = inverse(ranks)

    def relabelled(shards: tuple[Shards, ...]) -> tuple[Shards, ...]:
        return tuple(tuple(sorted(ranks[shard] for shard in shards[part])) for part in parts)

    hops = {hop: tuple(ranks[hop[part]] for part in parts) for hop in set(schedule.hops)}
    return Schedule(
        relabelled(schedule.q), relabelled(schedule.kv), tuple(hops[hop] for hop in schedule.hops)
    )


def place(placed: Placed, n: int) -> Schedule:
    """The schedule of a placed route for n ranks."""
    schedule = make_schedule(placed.route, n)
    return schedule if placed.in_rank_order else relabel(schedule, permutation(placed, n))


def divisors(n: int) -> list[int]:
    """All divisors of n, rising."""
    low = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]


def routes(n: int) -> list[dict[str, Any]]:
    """All routes for n ranks, the simplest first, without other names of a ring (mesh of 1 row)."""
    inner = [d for d in divisors(n) if 1 < d < n]
    plain: list[dict[str, Any]] = [{"name": "ring"}]
    if n == 1:
        return plain
    plain.append({"name": "all_gather"})
    plain += [{"name": "double_ring", "inner": d} for d in inner]
    plain += [{"name": "mesh", "rows": d, "cols": n // d} for d in (*inner, n)]
    teams = [c for c in divisors(n) if c > 1 and n % (c * c) == 0]
    return plain + [{"name": "concentric", "team_size": c} for c in teams]


@lru_cache(maxsize=64)  # used for the forward and for the backward
def placements(n: int) -> tuple[Placed, ...]:
    """Every route for n ranks with every order of its digits."""
    return tuple(
        replace(default_placement(route, n), order=order)
        for route in routes(n)
        for order in orders(digits(route, n))
    )
