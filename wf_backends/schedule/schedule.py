"""Who meets whom, as plain data.

Pure: standard library only. A route is three fields; what is held at each step, the tiles, the
messages, their bytes and the way home are derived from them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from types import MappingProxyType

from wf_backends._validation import nearest

Shards = tuple[int, ...]  # shard b is what rank b owns
Hop = tuple[int, ...]  # rank r hands what it holds to rank hop[r]: a permutation


@dataclass(frozen=True, slots=True)
class Schedule:
    """One exact way for query shards and key shards to meet.

    Rank r computes the rows of the query shards q[r]; it first holds the keys of the shards
    kv[r]; after step s it hands its keys to rank hops[s][r].
    """

    q: tuple[Shards, ...]
    kv: tuple[Shards, ...]
    hops: tuple[Hop, ...] = ()

    @property
    def num_ranks(self) -> int:
        return len(self.q)

    @property
    def num_steps(self) -> int:
        return len(self.hops) + 1

    def places(self) -> tuple[Shards, ...]:
        """Where the keys that rank o first holds are at every step: [step][o] -> rank."""
        found = [tuple(range(self.num_ranks))]
        for hop in self.hops:
            found.append(tuple(map(hop.__getitem__, found[-1])))
        return tuple(found)

    def origins(self) -> tuple[Shards, ...]:
        """Which rank first held the keys that a rank holds at a step: [step][rank] -> rank."""
        found = [tuple(range(self.num_ranks))]
        for back in _each(inverse, self.hops):
            found.append(tuple(map(found[-1].__getitem__, back)))
        return tuple(found)

    def holdings(self) -> tuple[tuple[Shards, ...], ...]:
        """The key shards that every rank holds at every step: [step][rank]."""
        return tuple(tuple(map(self.kv.__getitem__, at)) for at in self.origins())

    def gathers(self) -> tuple[bool, bool]:
        """Whether any rank brings (queries, keys) together that are not its own."""
        own = tuple((rank,) for rank in range(self.num_ranks))
        return self.q != own, self.kv != own

    @property
    def has_laps(self) -> bool:
        """Whether hops differ: laps of near ranks, and jumps to others."""
        return any(hop is not self.hops[0] and hop != self.hops[0] for hop in self.hops)

    def turned(self) -> Schedule:
        """The same meetings with the keys staying and the queries walking.

        In the result the field `q` names the shards that stay (keys) and `kv` those that walk
        (queries). If keys reach rank r from origin o at step s, queries of r now reach o.
        """
        if not self.has_laps:
            return Schedule(self.kv, self.q, _each(inverse, self.hops))
        steps = pairwise(self.origins())
        hops = (tuple(map(then.__getitem__, inverse(now))) for now, then in steps)
        return Schedule(self.kv, self.q, tuple(hops))


def inverse(hop: Hop) -> Hop:
    """Whom a rank gets what it holds from."""
    back = [0] * len(hop)
    for rank, to in enumerate(hop):
        back[to] = rank
    return tuple(back)


def _each(
    change: Callable[[tuple[int, ...]], tuple[int, ...]], several: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], ...]:
    """Each of them changed; once, where it is the same object, as all hops of a long ring are."""
    changed = {key: change(one) for key, one in {id(one): one for one in several}.items()}
    return tuple(changed[id(one)] for one in several)


def mirrored(schedule: Schedule) -> Schedule:
    """The same route turning the other way: rank r plays the part of rank n - 1 - r."""
    last = schedule.num_ranks - 1

    def flip(own: Shards) -> Shards:
        return tuple(sorted(last - shard for shard in own))

    def turn(hop: Hop) -> Hop:
        return tuple(last - rank for rank in reversed(hop))

    q, kv = (_each(flip, shards)[::-1] for shards in (schedule.q, schedule.kv))
    return Schedule(q, kv, _each(turn, schedule.hops))


def check(schedule: Schedule) -> Schedule:
    """The schedule itself, once it is proved that every pair meets exactly once.

    Raises:
        ValueError: if a hop is no permutation of the ranks, or naming the (query shard, key
            shard) pairs that do not meet exactly once.
    """
    n = schedule.num_ranks
    for hop in {id(hop): hop for hop in schedule.hops}.values():
        if sorted(hop) != list(range(n)):
            raise ValueError(f"a hop must be a permutation of the {n} ranks, got {hop}")
    met: list[list[int]] = [[] for _ in range(n)]
    for queries, held in zip(schedule.q, zip(*schedule.holdings(), strict=True), strict=True):
        keys = list(chain.from_iterable(held))
        for i in queries:
            met[i] += keys
    bad = [pair for i, keys in enumerate(met) for pair in _not_once(i, keys, n)]
    if bad:
        raise ValueError(
            "every (query shard, key shard) pair must meet exactly once; "
            f"{len(bad)} do not, as (query, key, times): {bad[:4]}"
        )
    return schedule


def _not_once(i: int, keys: list[int], n: int) -> list[tuple[int, int, int]]:
    """(query shard, key shard, times) of all key shards that i does not meet exactly once."""
    if sorted(keys) == list(range(n)):
        return []
    times = Counter(keys)
    return [(i, j, times[j]) for j in range(n) if times[j] != 1]


def render(schedule: Schedule) -> str:
    """The step x rank grid: which key shards meet which query shards, where and when."""
    held = schedule.holdings()
    head = ["rank", "queries", *(f"step {step}" for step in range(schedule.num_steps))]
    rows = [
        [str(rank), _names(schedule.q[rank]), *(_names(keys[rank]) for keys in held)]
        for rank in range(schedule.num_ranks)
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
    return "\n".join(lines)


def _names(shards: Shards) -> str:
    """Shard numbers, runs shortened: (0, 1, 2, 3, 6) -> "0-3,6"."""
    runs: list[list[int]] = []
    for shard in sorted(shards):
        if runs and shard == runs[-1][1] + 1:
            runs[-1][1] = shard
        else:
            runs.append([shard, shard])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "-"


def _own(n: int) -> tuple[Shards, ...]:
    return tuple((rank,) for rank in range(n))


def ring(n: int) -> Schedule:
    """Ring Attention (arXiv 2310.01889): keys walk once around, towards lower ranks.

    Towards lower ranks because under a causal zigzag what still walks shrinks that way.
    """
    return Schedule(_own(n), _own(n), (tuple((r - 1) % n for r in range(n)),) * (n - 1))


def double_ring(n: int, inner: int) -> Schedule:
    """LoongTrain's double ring (arXiv 2406.18485): laps of `inner` neighbours, then a jump.

    Raises:
        ValueError: if inner does not divide n.
    """
    _require(inner >= 1 and n % inner == 0, "inner", inner, f"divide the {n} ranks of the route")
    step = tuple(r // inner * inner + (r - 1) % inner for r in range(n))
    jump = tuple((r - inner) % n for r in range(n))
    lap = (step,) * (inner - 1)
    return Schedule(_own(n), _own(n), lap + ((jump,) + lap) * (n // inner - 1))


def all_gather(n: int) -> Schedule:
    """LSS Transformer (arXiv 2311.02382), all-gather CP: every rank holds all keys at once."""
    return Schedule(_own(n), (tuple(range(n)),) * n)


def concentric(n: int, team_size: int) -> Schedule:
    """WallFacer / StarTrail: teams share their queries, keys walk in sub-rings of teams.

    Rank = t * C + a is member a of team t. With G = n / C**2, the keys of team t first go to
    team a * G + t // C, member t % C, for every a; then they walk G steps among the teams of
    one block of G.

    Args:
        n: ranks of the route. team_size: C, ranks that share their queries.

    Raises:
        ValueError: if the square of team_size does not divide n.

    Source: arXiv 2407.00611, section 3.2 and appendix A.2.
    """
    fits = team_size >= 1 and n % team_size**2 == 0
    _require(fits, "team_size", team_size, f"have a square that divides the {n} ranks of the route")
    length = n // team_size**2

    def members(team: int) -> Shards:
        return tuple(range(team * team_size, (team + 1) * team_size))

    def following(team: int) -> int:
        return (team + 1) % length + length * (team // length)

    at = [divmod(rank, team_size) for rank in range(n)]
    q = tuple(members(team) for team, _ in at)
    kv = tuple(members(team % length * team_size + member) for team, member in at)
    hop = tuple(following(team) * team_size + member for team, member in at)
    return Schedule(q, kv, (hop,) * (length - 1))


def mesh(rows: int, cols: int) -> Schedule:
    """Mesh-Attention, Attention2D: a rank gathers `rows` query shards, `cols` key shards pass it.

    The keys walk, so that a step's transfer hides behind the step before.

    Source: arXiv 2512.20968; arXiv 2503.15758.
    """
    n = rows * cols
    _require(rows >= 1 and cols >= 1, "rows and cols", (rows, cols), "be at least 1")
    q = tuple(tuple(range(r // rows * rows, (r // rows + 1) * rows)) for r in range(n))
    return Schedule(q, _own(n), (tuple((r - rows) % n for r in range(n)),) * (cols - 1))


def _mesh_of(n: int, rows: int, cols: int) -> Schedule:
    product = f"multiply to the {n} ranks of the route"
    _require(rows * cols == n, "rows and cols", (rows, cols), product)
    return mesh(rows, cols)


def _require(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise ValueError(f"{name} must {rule}, got {value}")


@dataclass(frozen=True, slots=True)
class RouteKind:
    """A route by name: how to build it for n ranks, and the keys it takes beside the name."""

    build: Callable[..., Schedule]
    keys: tuple[str, ...] = ()
    keys_stay: bool = False
    """Whether keys are the side that stays in a forward too: what stays is brought together one
    owner after another, behind the tiles of those that are there. For routes on which nothing
    walks: queries that walk have to bring their results home."""
    gathers: bool = True
    """Whether ranks may bring rows of several owners together. Where none does, halves of a shard
    may walk in opposite directions."""


ROUTES: Mapping[str, RouteKind] = MappingProxyType(
    {
        "ring": RouteKind(ring, gathers=False),
        "double_ring": RouteKind(double_ring, ("inner",), gathers=False),
        "all_gather": RouteKind(all_gather, keys_stay=True),
        "concentric": RouteKind(concentric, ("team_size",)),
        "mesh": RouteKind(_mesh_of, ("rows", "cols")),
    }
)


def make_schedule(route: Mapping[str, object], n: int) -> Schedule:
    """The schedule of a route given as in the config, e.g. {"name": "mesh", "rows": 2, "cols": 4}.

    Raises:
        ValueError: if the name or a key is unknown or missing, a value is no positive integer,
            or the route does not fit n ranks.
    """
    name = route.get("name")
    if not isinstance(name, str) or name not in ROUTES:
        raise ValueError(
            f"route name must be one of {list(ROUTES)}, got {name!r}{nearest(name, ROUTES)}"
        )
    kind = ROUTES[name]
    values = {key: value for key, value in route.items() if key != "name"}
    for key in values:
        if key not in kind.keys:
            takes = f"takes {list(kind.keys)}" if kind.keys else "takes no other key"
            raise ValueError(f"route {name!r} {takes}, got {key!r}{nearest(key, kind.keys)}")
    for key in kind.keys:
        value = values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"route {name!r} needs {key!r}, a positive integer, got {value!r}")
    return _build(name, n, tuple(values[key] for key in kind.keys))


@lru_cache(maxsize=64)  # asked when a config is checked, and by every plan of its calls
def _build(name: str, n: int, values: tuple[object, ...]) -> Schedule:
    kind = ROUTES[name]
    return kind.build(n, **dict(zip(kind.keys, values, strict=True)))
