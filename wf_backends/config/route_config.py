"""Routes as a configuration and a command line write them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from wf_backends._validation import AUTO, listed, nearest
from wf_backends.schedule import (
    ORDER,
    ROUTES,
    Placed,
    divisors,
    make_schedule,
    read_placed,
)

Route = Mapping[str, Any] | str | None


def checked_route(key: str, route: Any, size: int, degree: int | str | None) -> Route:
    """A named route as an object, checked against the number of ranks.

    Args:
        key: the config's key. size: sequence_parallel_size. degree: ulysses_degree, or "auto".

    Raises:
        ValueError: naming the key, the route and what would be right.
    """
    if not isinstance(route, str | Mapping):
        raise ValueError(
            f'{key} must be "auto" or an object such as {{"name": "ring"}}, got {route!r}'
        )
    fields = {"name": route} if isinstance(route, str) else dict(cast(Mapping[str, Any], route))
    degrees = divisors(size) if degree == AUTO else [cast(int, degree)]
    fitting = (d for d in degrees if fits(fields, size // d))
    route_size = size // next(fitting, degrees[0])
    try:
        fields = read_placed(fields, route_size, size).to_dict()
    except ValueError as error:
        ranks = f"sequence_parallel_size {size} / ulysses_degree {degree} = {route_size}"
        if degree == AUTO:
            ranks = f"and fits no ulysses_degree of {listed(degrees)}"
        raise ValueError(f"{key}: {error} ({ranks})") from None
    if ORDER in fields:
        fields[ORDER] = tuple(fields[ORDER])
    return MappingProxyType(dict(sorted(fields.items())))


def parse_route(option: str, text: str, size: int) -> Placed:
    """A route from "ring" or "mesh:rows=2,cols=4,order=1-0", if it fits `size` ranks.

    Raises:
        ValueError: naming the option, if the text has another form or the route does not fit.
    """
    name, _, rest = text.partition(":")
    route: dict[str, Any] = {"name": name}
    for pair in filter(None, rest.split(",")):
        key, _, value = (part.strip() for part in pair.partition("="))
        if key in route:
            raise ValueError(f"{option} gives {key!r} twice, got {text!r}")
        if re.fullmatch(r"\d+", value) and key != ORDER:
            route[key] = int(value)
        elif re.fullmatch(r"\d+(-\d+)*", value) and key == ORDER:
            route[key] = [int(digit) for digit in value.split("-")]
        else:
            raise ValueError(
                f"{option} must look like ring, mesh:rows=2,cols=4 or "
                f"mesh:rows=2,cols=4,order=1-0, got {text!r}; routes: {list(ROUTES)}"
            )
    return read_placed(route, size, size)


def fits(route: Mapping[str, Any], size: int) -> bool:
    """Whether a route exists for `size` ranks."""
    try:
        read_placed(route, size)
    except ValueError:
        return False
    return True


def default_moves(route: Route) -> str:
    """Which side walks in a backward on this route if "backward_moves" is not given.

    Keys walk, except on an all-gather with "host_size": there they stay, as in the forward.
    """
    if not isinstance(route, Mapping):  # a name, None, or a value that is refused later
        return "keys"
    keys_stay = route.get("name") == "all_gather" and route.get("host_size", 1) != 1
    return "queries" if keys_stay else "keys"


def check_host_size(placed: Placed, size: int, moves: str, option: str = "backward_moves") -> None:
    """Refuse a "host_size" that has no effect in the backward: the side that stays is not gathered.

    Args:
        placed: for `size` ranks. moves: which side walks. option: the key or option that says so.

    Raises:
        ValueError: naming what to change.
    """
    gathers_queries, gathers_keys = make_schedule(placed.route, size).gathers()
    stays, is_gathered = ("queries", gathers_queries) if moves == "keys" else ("keys", gathers_keys)
    if placed.host_size > 1 and not is_gathered:
        raise ValueError(
            f"host_size {placed.host_size} of route {placed.route['name']!r} has no effect in the "
            f"backward with {option} {moves!r}: use {stays!r}"
        )


def as_json(value: Any) -> Any:
    """A route with its order as a list; any other value as it is."""
    if not isinstance(value, Mapping):
        return value
    route = cast(Mapping[str, Any], value)
    return {key: list(part) if key == ORDER else part for key, part in route.items()}


def key_hint(key: str, known: Sequence[str]) -> str:
    """What a user may have meant by an unknown key: a key of a route, or the nearest known key."""
    for name, kind in ROUTES.items():
        if key in kind.keys:
            return f'; it belongs inside "route": {{"name": "{name}", "{key}": ...}}'
    return nearest(key, known)
