"""Routes as a configuration and a command line write them.

Pure: standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from wf_backends._validation import AUTO, nearest
from wf_backends.planner import MOVES
from wf_backends.schedule import (
    ORDER,
    REVERSE,
    ROUTES,
    Placed,
    divisors,
    make_schedule,
    read_placed,
)

Route = Mapping[str, Any] | str | None


def checked_route(key: str, route: Any, size: int, degree: int | str | None) -> Route:
    """A route that is named, as an object, once it is known to fit.

    Args:
        key: under which it stands. size: ranks of one sequence. degree: of Ulysses, or "auto".

    Raises:
        ValueError: naming the key, the route and what would be right.
    """
    if not isinstance(route, str | Mapping):
        raise ValueError(
            f'{key} must be "auto" or an object such as {{"name": "ring"}}, got {route!r}'
        )
    words = {"name": route} if isinstance(route, str) else dict(cast(Mapping[str, Any], route))
    known = divisors(size) if degree == AUTO else [cast(int, degree)]
    least = next((d for d in known if fits(words, size // d)), known[0])
    try:
        words = read_placed(words, size // least, size).to_words()
    except ValueError as error:
        ranks = f"sequence_parallel_size {size} / ulysses_degree {degree} = {size // least}"
        ranks = f"and fits no ulysses_degree of {known}" if degree == AUTO else ranks
        raise ValueError(f"{key}: {error} ({ranks})") from None
    if ORDER in words:
        words[ORDER] = tuple(words[ORDER])
    return MappingProxyType(dict(sorted(words.items())))


def parse_route(option: str, text: str, size: int) -> Placed:
    """A route from "ring" or "mesh:rows=2,cols=4,order=1-0,reverse=true", if it fits `size` ranks.

    Raises:
        ValueError: naming the option, if it is no such text, or if the route does not fit.
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
        elif value in ("true", "false") and key == REVERSE:
            route[key] = value == "true"
        else:
            raise ValueError(
                f"{option} must look like ring, mesh:rows=2,cols=4 or "
                f"mesh:rows=2,cols=4,order=1-0,reverse=true, got {text!r}; routes: {list(ROUTES)}"
            )
    return read_placed(route, size, size)


def fits(route: Mapping[str, Any], size: int) -> bool:
    """Whether a route is one for so many ranks."""
    try:
        read_placed(route, size)
    except ValueError:
        return False
    return True


def usual_moves(back: Route) -> str:
    """Which side walks in the backward where only its route is named.

    Keys; but on an all-gather whose rows cross to a host once they stay, as in the forward.
    """
    once = isinstance(back, Mapping) and back.get("host_size", 1) != 1
    return MOVES[once and cast(Any, back).get("name") == "all_gather"]


def check_host_size(placed: Placed, size: int, moves: str, option: str = "backward_moves") -> None:
    """Refuse a "host_size" that does nothing in the backward: it acts on a side that stays.

    Args:
        placed: the backward's route, for `size` ranks. option: that says which side moves.

    Raises:
        ValueError: naming what to change.
    """
    keys, queries = MOVES
    of_queries, of_keys = make_schedule(placed.route, size).gathers()
    if placed.host_size > 1 and not (of_queries if moves == keys else of_keys):
        raise ValueError(
            f"host_size {placed.host_size} of route {placed.route['name']!r} does nothing in the "
            f"backward with {option} {moves!r}: say {queries if moves == keys else keys!r}"
        )


def as_json(value: Any) -> Any:
    """A route with its order as a list; any other value as it is."""
    if not isinstance(value, Mapping):
        return value
    route = cast(Mapping[str, Any], value)
    return {key: list(part) if key == ORDER else part for key, part in route.items()}


def meant(key: str, known: Sequence[str]) -> str:
    """Where a key that stands outside its route belongs, or the nearest known key."""
    owner = next((name for name, kind in ROUTES.items() if key in kind.keys), None)
    if owner is None:
        return nearest(key, known)
    return f'; it belongs inside "route": {{"name": "{owner}", "{key}": ...}}'
