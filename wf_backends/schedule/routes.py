"""The routes by name. Each is one function that returns a schedule.

A new route is a function here and its row in `ROUTES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import cast

from wf_backends._validation import nearest, one_of
from wf_backends.schedule.schedule import Schedule, Shards, own_shards

ORDER, HOST_SIZE = "order", "host_size"  # keys of a placement, beside those of a route


def ring(n: int) -> Schedule:
    """Ring Attention (arXiv 2310.01889): keys walk once around, towards lower ranks.

    In this direction, fewer and fewer rows must walk on under a causal mask with zigzag shards.
    """
    return Schedule(own_shards(n), own_shards(n), (tuple((r - 1) % n for r in range(n)),) * (n - 1))


def double_ring(n: int, inner: int) -> Schedule:
    """LoongTrain's double ring (arXiv 2406.18485): laps of `inner` neighbours, then a jump."""
    _require(n % inner == 0, "inner", inner, f"divide the {n} ranks of the route")
    step = tuple(r // inner * inner + (r - 1) % inner for r in range(n))
    jump = tuple((r - inner) % n for r in range(n))
    lap = (step,) * (inner - 1)
    return Schedule(own_shards(n), own_shards(n), lap + ((jump,) + lap) * (n // inner - 1))


def all_gather(n: int) -> Schedule:
    """All-gather, as in the LSS Transformer (arXiv 2311.02382): every rank gathers all keys."""
    return Schedule(own_shards(n), (tuple(range(n)),) * n)


def concentric(n: int, team_size: int) -> Schedule:
    """WallFacer / StarTrail: teams share their queries, keys walk in sub-rings of teams.

    Rank = t * C + a is member a of team t. With G = n / C**2, the keys of team t first go to
    team a * G + t // C, member t % C, for every a; then they walk G steps among the teams of
    one block of G.

    Args:
        n: ranks of the route. team_size: C, ranks that share their queries.

    Source: arXiv 2407.00611, section 3.2 and appendix A.2.
    """
    rule = f"have a square that divides the {n} ranks of the route"
    _require(n % team_size**2 == 0, "team_size", team_size, rule)
    length = n // team_size**2

    def following(team: int) -> int:
        return (team + 1) % length + length * (team // length)

    teams = _consecutive(n, team_size)
    ranks = [divmod(rank, team_size) for rank in range(n)]  # as (team, member)
    q = tuple(teams[team] for team, _ in ranks)
    kv = tuple(teams[team % length * team_size + member] for team, member in ranks)
    hop = tuple(following(team) * team_size + member for team, member in ranks)
    return Schedule(q, kv, (hop,) * (length - 1))


def mesh(n: int, rows: int, cols: int) -> Schedule:
    """Mesh-Attention, Attention2D: a rank gathers `rows` query shards and meets `cols` key shards.

    Keys walk from step to step, so that a transfer overlaps with the step before.

    Source: arXiv 2512.20968; arXiv 2503.15758.
    """
    product = f"multiply to the {n} ranks of the route"
    _require(rows * cols == n, "rows and cols", (rows, cols), product)
    columns = _consecutive(n, rows)
    q = tuple(columns[r // rows] for r in range(n))
    return Schedule(q, own_shards(n), (tuple((r - rows) % n for r in range(n)),) * (cols - 1))


def _consecutive(n: int, size: int) -> list[Shards]:
    """The ranks 0 to n - 1 in groups of `size` neighbours."""
    return [tuple(range(start, start + size)) for start in range(0, n, size)]


def _require(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise ValueError(f"{name} must {rule}, got {value}")


@dataclass(frozen=True, slots=True)
class RouteKind:
    """How to build a route, and which keys the config takes for it besides its name."""

    build: Callable[..., Schedule]
    """Called with n and the values of `keys`, in their order."""
    keys: tuple[str, ...] = ()
    keys_stay: bool = False
    """Whether keys are the side that stays in the forward too. Then keys are gathered owner by
    owner, overlapped with the tiles of those that have arrived. Only for routes without hops:
    queries that walk would have to send their results back."""


ROUTES: Mapping[str, RouteKind] = MappingProxyType(
    {
        "ring": RouteKind(ring),
        "double_ring": RouteKind(double_ring, ("inner",)),
        "all_gather": RouteKind(all_gather, keys_stay=True),
        "concentric": RouteKind(concentric, ("team_size",)),
        "mesh": RouteKind(mesh, ("rows", "cols")),
    }
)


def make_schedule(route: Mapping[str, object], n: int) -> Schedule:
    """The schedule of a route given as in the config, e.g. {"name": "mesh", "rows": 2, "cols": 4}.

    Raises:
        ValueError: if the name or a key is unknown or missing, a value is not a positive integer,
            or the route does not fit n ranks.
    """
    name = cast(str, route.get("name"))
    one_of("route name", name, tuple(ROUTES))
    kind = ROUTES[name]
    values = {key: value for key, value in route.items() if key != "name"}
    for key in values:
        if key not in kind.keys:
            hint = nearest(key, (*kind.keys, ORDER, HOST_SIZE))
            takes = f"takes {list(kind.keys)}" if kind.keys else "takes no other key"
            raise ValueError(f"route {name!r} {takes}, got {key!r}{hint}")
    for key in kind.keys:
        value = values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"route {name!r} needs {key!r}, a positive integer, got {value!r}")
    return _build(kind.build, n, *(values[key] for key in kind.keys))


@lru_cache(maxsize=64)  # needed when a config is checked, and again by every plan of its calls
def _build(build: Callable[..., Schedule], n: int, *values: object) -> Schedule:
    return build(n, *values)
