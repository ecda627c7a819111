# pyright: reportUnnecessaryIsInstance=false
"""The words of a configuration: the same in a DeepSpeed JSON, a plugin and on the command line.

Pure: standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, cast

from wf_backends._validation import AUTO, is_number, nearest, one_of, positive
from wf_backends.cluster import KERNEL_NAMES, check_source
from wf_backends.planner import MOVES
from wf_backends.schedule import ORDER, ROUTES, check_layout_name, divisors, read_placed

APART = ("ulysses_stride", "ulysses_chunks")
LSS = "lss"
STRATEGIES = (LSS,)
KEEPS_NOTHING: Mapping[str, Any] = MappingProxyType({"keep_gathered": False, "kept_layers": 1})
LSS_ROUTE: Mapping[str, Any] = MappingProxyType({"name": "all_gather"})

Route = Mapping[str, Any] | str | None


@dataclass(frozen=True, kw_only=True)
class SequenceParallelConfig:
    """How one sequence is spread over ranks; checked when it is built.

    Raises:
        ValueError: naming the key, its value and what would be right.
    """

    sequence_parallel_size: int = 1
    """Ranks that share one sequence."""
    route: Route = AUTO
    """{"name": "ring" | "all_gather"}, {"name": "double_ring", "inner": 4}, {"name":
    "concentric", "team_size": 2}, {"name": "mesh", "rows": 2, "cols": 4}, or "auto". A name alone
    may be given as a string where the route takes no other key. Every route also takes a placement,
    "order": [1, 0] and "reverse": true (see `placement.read_placed`); without, rank order. Rings
    take "two_way": true: each shard walks in two halves that go opposite ways (see
    lowering/direction.py)."""
    backward_route: Route = None
    """The same forms; None = the forward's, or the planner's choice where route is "auto"."""
    backward_moves: str | None = None
    """Which side walks in the backward: "keys", "queries", or "auto". None = "keys" where the
    backward's route is named, else "auto"."""
    ulysses_degree: int | str | None = None
    """Ranks that trade heads for tokens; it divides sequence_parallel_size. Or "auto": chosen for
    each call by its heads. None = 1 where a route is named, else "auto"."""
    ulysses_stride: int | str | None = None
    """How far apart these are: 1 = consecutive ranks ("head-first" in LoongTrain), at most
    sequence_parallel_size / ulysses_degree ("context-first"), which it divides; see
    lowering/ulysses_groups.py. Or "auto". None = 1 where ulysses_degree is a number, else
    "auto"."""
    ulysses_chunks: int | str | None = None
    """In how many chunks a rank's heads are traded for tokens: while one is computed, the next is
    on its way here and the last one's results are on their way home. It divides the query and the
    key heads that a rank has after the exchange. Or "auto". None = as ulysses_stride."""
    layout: str = "zigzag"
    """"zigzag", "contiguous" or "document_zigzag" (packed documents of any length, balanced): which
    tokens a rank owns."""
    kernel: str = AUTO
    """"auto", "reference", "sdpa" or "flash"."""
    keep_gathered: bool | str = False
    """Keep the queries and keys that the forward gathered for the backward, in memory, instead of
    gathering them again. Both passes then take one route. "auto": where that is faster and those
    of `kept_layers` fit the topology's memory."""
    kept_layers: int = 1
    """How many attention layers keep them at a time: all of the model's, or 1 under activation
    checkpointing."""
    strategy: str | None = None
    """None: the route decides. "lss": LSS Transformer, which is the route "all_gather" with all
    gathered keys kept for the backward."""

    topology: str | None = None
    """What "auto" goes by: the name of a preset, a .json or .toml file, "measure" (the job's links,
    at first use), or None = the one-host preset on cores of one host, else measured."""

    def __post_init__(self) -> None:
        positive("sequence_parallel_size", self.sequence_parallel_size)
        check_layout_name(self.layout)
        one_of("kernel", self.kernel, (AUTO, *KERNEL_NAMES))
        if self.strategy is not None:
            self._check_strategy()
        self._check_keep()
        self._fill_in()
        one_of("backward_moves", self.backward_moves, (AUTO, *MOVES))
        self._check_degree()
        self._check_stride()
        self._check_chunks()
        for name in ("route", "backward_route"):
            object.__setattr__(self, name, self._checked_route(name))
        if not self.degrees:
            stride = self.ulysses_stride
            apart = "" if stride in (AUTO, 1) else f" with ulysses_stride {stride}"
            raise ValueError(
                f"no ulysses_degree of sequence_parallel_size {self.sequence_parallel_size} fits "
                f"both route {self.to_dict()['route']} and backward_route "
                f"{self.to_dict()['backward_route']}{apart}"
            )
        if self.topology is not None:
            self._check_topology()

    @property
    def degrees(self) -> tuple[int, ...]:
        """The ulysses degrees that may be used: the one given, or all that the routes fit."""
        if self.ulysses_degree != AUTO:
            return (cast(int, self.ulysses_degree),)
        routes = [r for r in (self.route, self.backward_route) if isinstance(r, Mapping)]
        size, stride = self.sequence_parallel_size, self.ulysses_stride
        return tuple(
            degree
            for degree in divisors(size)
            if all(_fits(route, size // degree) for route in routes)
            and (stride in (AUTO, 1) or (degree > 1 and size // degree % cast(int, stride) == 0))
        )

    @property
    def leaves_open(self) -> bool:
        """Whether something is "auto", so that a plan has to be chosen."""
        keys = "route", "backward_route", "backward_moves", "keep_gathered"
        keys += "ulysses_degree", "ulysses_stride", "ulysses_chunks"
        return AUTO in [getattr(self, key) for key in keys]

    @classmethod
    def from_dict(cls, words: Mapping[str, Any]) -> SequenceParallelConfig:
        """The config of a JSON object; unknown keys are refused with the nearest right one."""
        known = [f.name for f in fields(cls)]
        for key in words:
            if key not in known:
                raise ValueError(f"unknown key {key!r}{meant(key, known)} (known keys: {known})")
        return cls(**words)

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` takes; keys added later only where they are set."""
        words = {f.name: getattr(self, f.name) for f in fields(self)}
        later = {"strategy": None, "topology": None, **dict.fromkeys(APART, self._usually)}
        for key, unset in {**later, **KEEPS_NOTHING}.items():
            if words[key] == unset:
                del words[key]
        return {
            key: _plain(cast(Mapping[str, Any], value)) if isinstance(value, Mapping) else value
            for key, value in words.items()
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return SequenceParallelConfig.from_dict, (self.to_dict(),)

    def __hash__(self) -> int:
        return hash(repr(self.to_dict()))

    def _check_strategy(self) -> None:
        """Refuse what contradicts the strategy, and spell out the route that it names."""
        one_of("strategy", self.strategy, STRATEGIES)
        if self.route == AUTO:
            object.__setattr__(self, "route", LSS_ROUTE["name"])
        right = {
            "route": (LSS_ROUTE["name"], LSS_ROUTE),
            "backward_route": (None, LSS_ROUTE["name"], LSS_ROUTE),
            "backward_moves": (None, "keys"),
            "ulysses_degree": (None, 1),
            **dict.fromkeys(APART, (None, 1)),
            "keep_gathered": (False,),
        }
        for key, values in right.items():
            if (value := getattr(self, key)) not in values:
                raise ValueError(
                    f'{key} {value!r} contradicts strategy "{LSS}", which gathers all keys; '
                    f"leave {key} out"
                )

    def _check_keep(self) -> None:
        if not isinstance(self.keep_gathered, bool) and self.keep_gathered != AUTO:
            raise ValueError(
                f'keep_gathered must be true, false or "{AUTO}", got {self.keep_gathered!r}'
            )
        if self.keep_gathered is True and self.backward_route not in (None, self.route):
            raise ValueError(
                f"keep_gathered keeps what the forward's route {self.route!r} gathers, which "
                f"backward_route {self.backward_route!r} has no use for: leave one of them out"
            )
        positive("kept_layers", self.kept_layers)
        if self.kept_layers > 1 and self.keep_gathered != AUTO:
            raise ValueError(
                f'kept_layers {self.kept_layers} is what keep_gathered "{AUTO}" goes by, got '
                f"keep_gathered {self.keep_gathered!r}: leave kept_layers out"
            )

    def _fill_in(self) -> None:
        """What follows from the routes where it is not given."""
        back = self.route if self.backward_route is None else self.backward_route
        if self.backward_moves is None:
            object.__setattr__(self, "backward_moves", AUTO if back == AUTO else MOVES[0])
        if self.ulysses_degree is None:
            named = self.route != AUTO or back != AUTO
            object.__setattr__(self, "ulysses_degree", 1 if named else AUTO)
        for key in APART:
            if getattr(self, key) is None:
                object.__setattr__(self, key, self._usually)

    @property
    def _usually(self) -> int | str:
        """What the keys in APART are where they are not given."""
        return AUTO if self.ulysses_degree == AUTO else 1

    def _check_degree(self) -> None:
        degree, size = self.ulysses_degree, self.sequence_parallel_size
        if is_number("ulysses_degree", degree) and size % cast(int, degree):
            raise ValueError(
                f"ulysses_degree must divide sequence_parallel_size {size}, got {degree}"
            )

    def _check_stride(self) -> None:
        """That of a degree left to the planner is checked with the routes: see `degrees`."""
        degree, stride = self.ulysses_degree, self.ulysses_stride
        if not is_number("ulysses_stride", stride) or degree == AUTO or stride == 1:
            return
        pools = self.sequence_parallel_size // cast(int, degree)
        if degree == 1:
            raise ValueError(
                f"ulysses_stride {stride} is how far apart ranks are that trade heads for tokens, "
                "and with ulysses_degree 1 none do: leave ulysses_stride out"
            )
        if pools % cast(int, stride):
            raise ValueError(
                f"ulysses_stride must divide sequence_parallel_size / ulysses_degree = {pools}, "
                f"got {stride}"
            )

    def _check_chunks(self) -> None:
        """Whether they divide the heads is seen when there are heads: see `Exchange.split`."""
        degree, chunks = self.ulysses_degree, self.ulysses_chunks
        if is_number("ulysses_chunks", chunks) and degree == 1 and chunks != 1:
            raise ValueError(
                f"ulysses_chunks {chunks} is in how many parts heads are traded for tokens, and "
                "with ulysses_degree 1 none are: leave ulysses_chunks out"
            )

    def _check_topology(self) -> None:
        check_source(self.topology)
        if not self.leaves_open:
            raise ValueError(
                f'topology {self.topology!r} is what "{AUTO}" goes by, but nothing is "{AUTO}": '
                "leave it out"
            )

    def _checked_route(self, key: str) -> Route:
        """The route with its name spelled out, once it is known to fit."""
        route: Any = getattr(self, key)
        if route is None and key == "backward_route":
            return None
        if route == AUTO:
            return AUTO
        if not isinstance(route, str | Mapping):
            raise ValueError(
                f'{key} must be "auto" or an object such as {{"name": "ring"}}, got {route!r}'
            )
        words = {"name": route} if isinstance(route, str) else dict(cast(Mapping[str, Any], route))
        size, degree = self.sequence_parallel_size, self.ulysses_degree
        known = divisors(size) if degree == AUTO else [cast(int, degree)]
        fits = next((d for d in known if _fits(words, size // d)), known[0])
        try:
            words = read_placed(words, size // fits).to_words()
        except ValueError as error:
            ranks = f"sequence_parallel_size {size} / ulysses_degree {degree} = {size // fits}"
            ranks = f"and fits no ulysses_degree of {known}" if degree == AUTO else ranks
            raise ValueError(f"{key}: {error} ({ranks})") from None
        if ORDER in words:
            words[ORDER] = tuple(words[ORDER])
        return MappingProxyType(dict(sorted(words.items())))


def _fits(route: Mapping[str, Any], size: int) -> bool:
    try:
        read_placed(route, size)
    except ValueError:
        return False
    return True


def _plain(route: Mapping[str, Any]) -> dict[str, Any]:
    """A route as a JSON has it."""
    return {key: list(value) if key == ORDER else value for key, value in route.items()}


def meant(key: str, known: Sequence[str]) -> str:
    """Where a key that stands outside its route belongs, or the nearest known key."""
    owner = next((name for name, kind in ROUTES.items() if key in kind.keys), None)
    if owner is None:
        return nearest(key, known)
    return f'; it belongs inside "route": {{"name": "{owner}", "{key}": ...}}'
