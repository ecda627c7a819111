# pyright: reportUnnecessaryIsInstance=false
"""The words of a configuration: the same in a DeepSpeed JSON, a plugin and on the command line.

Pure: standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, cast

from wf_backends._validation import AUTO, is_number, one_of, positive, seconds
from wf_backends.cluster import KERNEL_NAMES, check_source
from wf_backends.config.route_words import (
    Route,
    as_json,
    check_host_size,
    checked_route,
    fits,
    meant,
    usual_moves,
)
from wf_backends.lowering import FLOAT32, PARTIALS
from wf_backends.planner import MOVES
from wf_backends.schedule import LAYOUTS, divisors, read_placed

ULYSSES_DETAILS: Mapping[str, str] = MappingProxyType(
    {
        "ulysses_stride": "how far apart ranks are that trade heads for tokens, and {} none do",
        "ulysses_chunks": "in how many parts heads are traded for tokens, and {} none are",
    }
)
SILENT = ("keep_gathered", "kept_layers", "partials", "strategy", "topology", "timeout")
"""Keys that a configuration leaves out where they say nothing new."""
LSS = "lss"


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
    may be given as a string where the route takes no other key. Every route takes a placement,
    "order": [1, 0] and "reverse": true (see `placement.read_placed`), and those that gather
    "host_size": 8 (rows cross to a host of 8 ranks once)."""
    backward_route: Route = None
    """The route of the backward, in the same forms. None = the forward's, or what the planner
    chooses where route is "auto"."""
    backward_moves: str | None = None
    """Which side is passed from rank to rank in the backward: "keys", "queries", or "auto". None =
    "keys" where the backward's route is named ("queries" on an "all_gather" with "host_size", whose
    keys stay), else "auto"."""
    ulysses_degree: int | str | None = None
    """Ranks that trade heads for tokens (DeepSpeed-Ulysses). It divides sequence_parallel_size. Or
    "auto": chosen for each call by its heads. None = 1 where a route is named, else "auto"."""
    ulysses_stride: int | str | None = None
    """How far apart these ranks are: 1 = consecutive ranks ("head-first" in LoongTrain), up to
    sequence_parallel_size / ulysses_degree ("context-first"), which it divides. Or "auto". None = 1
    where ulysses_degree is a number, else "auto"."""
    ulysses_chunks: int | str | None = None
    """In how many parts a rank's heads are traded for tokens: while one part is computed, the next
    one arrives and the results of the one before are sent back. It divides the query and the key
    heads that a rank has after the exchange. Or "auto". None = like ulysses_stride."""
    layout: str = "zigzag"
    """Which tokens a rank owns: "zigzag" (balances causal attention), "contiguous",
    "document_zigzag" (balances packed documents of any length) or "balanced" (a mask in slices)."""
    kernel: str = AUTO
    """What computes attention on a rank: "auto", "reference", "sdpa" or "flash"."""
    keep_gathered: bool | str = False
    """Whether queries and keys that the forward gathered stay in memory for the backward, instead
    of being gathered again. Both passes then take one route. "auto": where that is faster and
    those of `kept_layers` layers fit the topology's memory."""
    kept_layers: int = 1
    """How many attention layers keep them at the same time: all of the model's, or 1 under
    activation checkpointing."""
    partials: str = FLOAT32
    """How partial results (out, dq, dk, dv) travel: in "float32", or in the "activation" dtype."""
    strategy: str | None = None
    """None, or "lss": LSS Transformer, the route "all_gather" with all keys gathered in one
    exchange and kept for the backward."""
    topology: str | None = None
    """Hosts and links, from which "auto" is chosen: a preset's name, a .json or .toml file, or
    "measure" (at first use). None = the one-host preset on cores of one host, else measured."""
    timeout: float | None = None
    """Seconds that a message waits for its peer before the call fails, on gloo and MPI. None = as
    long as the group that is given waits (under MPI: the default group, or 600 s)."""

    def __post_init__(self) -> None:
        positive("sequence_parallel_size", self.sequence_parallel_size)
        one_of("layout", self.layout, tuple(LAYOUTS))
        one_of("kernel", self.kernel, (AUTO, *KERNEL_NAMES))
        one_of("partials", self.partials, PARTIALS)
        if self.strategy is not None:
            self._check_strategy()
        self._check_keep()
        self._fill_in()
        one_of("backward_moves", self.backward_moves, (AUTO, *MOVES))
        self._check_ulysses()
        for key, unsaid in (("route", (AUTO,)), ("backward_route", (AUTO, None))):
            if (route := getattr(self, key)) not in unsaid:
                size, degree = self.sequence_parallel_size, self.ulysses_degree
                self._set(key, checked_route(key, route, size, degree))
        self._check_degrees()
        self._check_host_size()
        seconds("timeout", self.timeout)
        if self.topology is not None:
            self._check_topology()

    def _set(self, key: str, value: object) -> None:
        object.__setattr__(self, key, value)  # frozen from here on

    @property
    def _back(self) -> Route:
        """The backward's route."""
        return self.route if self.backward_route is None else self.backward_route

    @property
    def degrees(self) -> tuple[int, ...]:
        """The ulysses degrees that may be used: the one given, or all that the routes fit."""
        if self.ulysses_degree != AUTO:
            return (cast(int, self.ulysses_degree),)
        routes = [r for r in (self.route, self.backward_route) if isinstance(r, Mapping)]
        size, stride = self.sequence_parallel_size, self.ulysses_stride
        near = stride in (AUTO, 1)
        return tuple(
            degree
            for degree in divisors(size)
            if all(fits(route, size // degree) for route in routes)
            and (near or (degree > 1 and size // degree % cast(int, stride) == 0))
        )

    @property
    def leaves_open(self) -> bool:
        """Whether something is "auto", so that a plan has to be chosen."""
        return any(getattr(self, f.name) == AUTO for f in fields(self) if f.name != "kernel")

    @classmethod
    def from_dict(cls, words: Mapping[str, Any]) -> SequenceParallelConfig:
        """The config of a JSON object; unknown keys are refused with the nearest right one.

        Raises:
            ValueError: naming the key, its value and what would be right; or if `words` is no
                object of keys and values.
        """
        if not isinstance(words, Mapping):
            raise ValueError(f"a configuration must be an object of keys and values, got {words!r}")
        known = [f.name for f in fields(cls)]
        for key in words:
            if key not in known:
                raise ValueError(f"unknown key {key!r}{meant(key, known)} (known keys: {known})")
        return cls(**words)

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` takes, as a JSON has it; some keys only where they say something."""
        words = {f.name: as_json(getattr(self, f.name)) for f in fields(self)}
        silent = {f.name: f.default for f in fields(self) if f.name in SILENT}
        silent |= dict.fromkeys(ULYSSES_DETAILS, self._ulysses_default)
        return {k: v for k, v in words.items() if k not in silent or v != silent[k]}

    def __reduce__(self) -> tuple[Any, ...]:
        return SequenceParallelConfig.from_dict, (self.to_dict(),)

    def __hash__(self) -> int:
        return hash(repr(self.to_dict()))

    def _check_strategy(self) -> None:
        """Refuse what contradicts the strategy, and write out the route that it means."""
        one_of("strategy", self.strategy, (LSS,))
        if self.route == AUTO:
            self._set("route", "all_gather")
        route = "all_gather", {"name": "all_gather"}
        right = {"route": route, "backward_route": (None, *route), "backward_moves": (None, "keys")}
        right |= dict.fromkeys(("ulysses_degree", *ULYSSES_DETAILS), (None, 1))
        right |= {"keep_gathered": (False,)}
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
        """What follows from the other keys where it is not given."""
        back = self._back
        if self.backward_moves is None:
            self._set("backward_moves", AUTO if back == AUTO else usual_moves(back))
        if self.ulysses_degree is None:
            self._set("ulysses_degree", AUTO if self.route == back == AUTO else 1)
        for key in ULYSSES_DETAILS:
            if getattr(self, key) is None:
                self._set(key, self._ulysses_default)

    @property
    def _ulysses_default(self) -> int | str:
        """What the keys in ULYSSES_DETAILS are where they are not given."""
        return AUTO if self.ulysses_degree == AUTO else 1

    def _check_ulysses(self) -> None:
        """What "auto" leaves open is checked with the routes (`degrees`), and with the heads."""
        size, degree, stride = self.sequence_parallel_size, self.ulysses_degree, self.ulysses_stride
        if is_number("ulysses_degree", degree) and size % cast(int, degree):
            raise ValueError(
                f"ulysses_degree must divide sequence_parallel_size {size}, got {degree}"
            )
        for key, meaning in ULYSSES_DETAILS.items():
            if is_number(key, value := getattr(self, key)) and degree == 1 and value > 1:
                what = meaning.format("with ulysses_degree 1")
                raise ValueError(f"{key} {value} is {what}: leave {key} out")
        if AUTO not in (degree, stride) and size // cast(int, degree) % cast(int, stride):
            raise ValueError(
                "ulysses_stride must divide sequence_parallel_size / ulysses_degree = "
                f"{size // cast(int, degree)}, got {stride}"
            )

    def _check_degrees(self) -> None:
        if self.degrees:
            return
        words, stride = self.to_dict(), self.ulysses_stride
        apart = "" if stride in (AUTO, 1) else f" with ulysses_stride {stride}"
        raise ValueError(
            f"no ulysses_degree of sequence_parallel_size {self.sequence_parallel_size} fits "
            f"both route {words['route']} and backward_route {words['backward_route']}{apart}"
        )

    def _check_host_size(self) -> None:
        """Refuse rows that are to cross to a host once where nothing in the backward would."""
        back, moves = self._back, cast(str, self.backward_moves)
        if AUTO not in (back, moves) and not self.keep_gathered:
            size = self.sequence_parallel_size // self.degrees[0]
            check_host_size(read_placed(cast(Mapping[str, Any], back), size), size, moves)

    def _check_topology(self) -> None:
        check_source(self.topology)
        if not self.leaves_open:
            raise ValueError(
                f'topology {self.topology!r} is what "{AUTO}" goes by, but nothing is "{AUTO}": '
                "leave it out"
            )
