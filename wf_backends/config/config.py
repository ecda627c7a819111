# pyright: reportUnnecessaryIsInstance=false
"""The configuration: the same keys in a DeepSpeed JSON, a plugin and on the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, cast

from wf_backends._validation import AUTO, is_number, one_of, positive, seconds
from wf_backends.cluster import KERNEL_NAMES, check_source
from wf_backends.config.route_config import (
    Route,
    as_json,
    check_host_size,
    checked_route,
    default_moves,
    fits,
    key_hint,
)
from wf_backends.lowering import FLOAT32, PARTIALS
from wf_backends.planner import MOVES
from wf_backends.schedule import LAYOUTS, divisors, read_placed

ULYSSES_DETAILS: Mapping[str, str] = MappingProxyType(
    {
        "ulysses_stride": "how far apart ranks are that exchange heads for tokens, and {} none do",
        "ulysses_chunks": "in how many parts heads are exchanged for tokens, and {} none are",
    }
)
OMITTED_KEYS = ("keep_gathered", "kept_layers", "partials", "strategy", "topology", "timeout")
"""Keys that `to_dict` writes only where their values are not the defaults."""
LSS = "lss"


@dataclass(frozen=True, kw_only=True)
class SequenceParallelConfig:
    """How one sequence is spread over ranks. Values are checked when it is built.

    Raises:
        ValueError: naming the key, its value and what would be right.
    """

    sequence_parallel_size: int = 1
    """Ranks that share one sequence."""
    route: Route = AUTO
    """{"name": "ring" | "all_gather"}, {"name": "double_ring", "inner": 4}, {"name":
    "concentric", "team_size": 2}, {"name": "mesh", "rows": 2, "cols": 4}, or "auto". A route that
    needs no other key may be given as a string, its name. Every route takes a placement, "order":
    [1, 0] (see `placement.read_placed`); routes that gather also take "host_size": 8 (rows cross to
    a host of 8 ranks once)."""
    backward_route: Route = None
    """The route of the backward, in the same forms. None = the forward's route, or the planner's
    choice where route is "auto"."""
    backward_moves: str | None = None
    """Which side is passed from rank to rank in the backward: "keys", "queries", or "auto". None =
    "keys" where the backward's route is named ("queries" on an "all_gather" with "host_size", whose
    keys stay), else "auto"."""
    ulysses_degree: int | str | None = None
    """How many ranks exchange heads for tokens (DeepSpeed-Ulysses). It divides
    sequence_parallel_size. Or "auto": chosen for each call by its heads. None = 1 where a route is
    named, else "auto"."""
    ulysses_stride: int | str | None = None
    """How far apart the ranks that exchange heads are: 1 = consecutive ranks ("head-first" in
    LoongTrain), up to sequence_parallel_size / ulysses_degree ("context-first"), which it divides.
    Or "auto". None = 1 where ulysses_degree is a number, else "auto"."""
    ulysses_chunks: int | str | None = None
    """In how many parts a rank's heads are exchanged for tokens: while a part is computed, the next
    part arrives and the results of the previous part are sent. It divides the query and the key
    heads that a rank has after the exchange. Or "auto". None = like ulysses_stride."""
    layout: str = "zigzag"
    """Which tokens a rank owns: "zigzag" (balances causal attention), "contiguous",
    "document_zigzag" (balances packed documents of any length) or "balanced" (a mask in slices)."""
    kernel: str = AUTO
    """What computes attention on a rank: "auto", "reference", "sdpa" or "flash"."""
    keep_gathered: bool | str = False
    """Whether queries and keys that the forward gathered stay in memory for the backward, instead
    of being gathered again. Both passes then take one route. "auto": where that is faster and
    what `kept_layers` layers keep fits the topology's memory."""
    kept_layers: int = 1
    """How many attention layers keep gathered queries and keys at the same time: all of the
    model's, or 1 under activation checkpointing."""
    partials: str = FLOAT32
    """Dtype in which partial results (out, dq, dk, dv) travel: "float32", or that of the
    activations, "activation"."""
    strategy: str | None = None
    """None, or "lss": LSS Transformer, the route "all_gather" with all keys gathered in one
    exchange and kept for the backward."""
    topology: str | None = None
    """Hosts and links, by which "auto" is chosen: a preset's name, a .json or .toml file, or
    "measure" (at first use). None = the one-host preset on CPUs of one host, else measured."""
    timeout: float | None = None
    """Seconds that a message waits for its peer before the call fails, on gloo and MPI. None = the
    timeout of the process group (under MPI: of the default group, or 600 s)."""

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
        for key, unnamed in (("route", (AUTO,)), ("backward_route", (AUTO, None))):
            route = getattr(self, key)
            if route not in unnamed:
                size, degree = self.sequence_parallel_size, self.ulysses_degree
                self._set(key, checked_route(key, route, size, degree))
        self._check_degrees()
        self._check_backward_route()
        seconds("timeout", self.timeout)
        if self.topology is not None:
            self._check_topology()

    def _set(self, key: str, value: object) -> None:
        object.__setattr__(self, key, value)  # the dataclass is frozen

    @property
    def route_of_backward(self) -> Route:
        """`backward_route`, or the forward's route where it is not given."""
        return self.route if self.backward_route is None else self.backward_route

    @property
    def degrees(self) -> tuple[int, ...]:
        """The ulysses degrees that may be used: the one named, or all that the routes allow."""
        if self.ulysses_degree != AUTO:
            return (cast(int, self.ulysses_degree),)
        routes = [r for r in (self.route, self.backward_route) if isinstance(r, Mapping)]
        size, stride = self.sequence_parallel_size, self.ulysses_stride
        stride_fits_all = stride in (AUTO, 1)
        return tuple(
            degree
            for degree in divisors(size)
            if all(fits(route, size // degree) for route in routes)
            and (stride_fits_all or (degree > 1 and size // degree % cast(int, stride) == 0))
        )

    @property
    def leaves_open(self) -> bool:
        """Whether something is "auto", so that a plan has to be chosen."""
        return any(getattr(self, f.name) == AUTO for f in fields(self) if f.name != "kernel")

    @classmethod
    def from_dict(
        cls, config: Mapping[str, Any], other_keys: Sequence[str] = ()
    ) -> SequenceParallelConfig:
        """The config of a JSON object.

        Args:
            other_keys: what else the object may have, taken out by the caller: errors name them.

        Raises:
            ValueError: naming the key, its value and what would be right, for an unknown key the
                nearest known one; or if `config` is no object of keys and values.
        """
        if not isinstance(config, Mapping):
            raise ValueError(
                f"a configuration must be an object of keys and values, got {config!r}"
            )
        own = [f.name for f in fields(cls)]
        known = [*other_keys, *own]
        for key in config:
            if key not in own:
                raise ValueError(f"unknown key {key!r}{key_hint(key, known)} (known keys: {known})")
        return cls(**config)

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` takes, as a JSON has it; without some keys at their defaults."""
        values = {f.name: as_json(getattr(self, f.name)) for f in fields(self)}
        omitted = {f.name: f.default for f in fields(self) if f.name in OMITTED_KEYS}
        omitted |= dict.fromkeys(ULYSSES_DETAILS, self._ulysses_default)
        return {k: v for k, v in values.items() if k not in omitted or v != omitted[k]}

    def __reduce__(self) -> tuple[Any, ...]:
        return SequenceParallelConfig.from_dict, (self.to_dict(),)

    def __hash__(self) -> int:
        return hash(repr(self.to_dict()))

    def _check_strategy(self) -> None:
        """Refuse keys that contradict the strategy, and set the route that it stands for."""
        one_of("strategy", self.strategy, (LSS,))
        if self.route == AUTO:
            self._set("route", "all_gather")
        route = "all_gather", {"name": "all_gather"}
        allowed = {"route": route, "backward_route": (None, *route)}
        allowed |= {"backward_moves": (None, "keys"), "keep_gathered": (False,)}
        allowed |= dict.fromkeys(("ulysses_degree", *ULYSSES_DETAILS), (None, 1))
        for key, values in allowed.items():
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
        positive("kept_layers", self.kept_layers)
        if self.kept_layers > 1 and self.keep_gathered != AUTO:
            raise ValueError(
                f"kept_layers {self.kept_layers} has an effect only with keep_gathered "
                f'"{AUTO}", got keep_gathered {self.keep_gathered!r}: leave kept_layers out'
            )

    def _fill_in(self) -> None:
        """Set keys that are not given to the values that follow from the other keys."""
        route_back = self.route_of_backward
        if self.backward_moves is None:
            self._set("backward_moves", AUTO if route_back == AUTO else default_moves(route_back))
        if self.ulysses_degree is None:
            self._set("ulysses_degree", AUTO if self.route == route_back == AUTO else 1)
        for key in ULYSSES_DETAILS:
            if getattr(self, key) is None:
                self._set(key, self._ulysses_default)

    @property
    def _ulysses_default(self) -> int | str:
        """The value of the keys in ULYSSES_DETAILS that are not given."""
        return AUTO if self.ulysses_degree == AUTO else 1

    def _check_ulysses(self) -> None:
        """Check named numbers; "auto" is checked with the routes (`degrees`) and with the heads."""
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
        values, stride = self.to_dict(), self.ulysses_stride
        apart = "" if stride in (AUTO, 1) else f" with ulysses_stride {stride}"
        raise ValueError(
            f"no ulysses_degree of sequence_parallel_size {self.sequence_parallel_size} fits "
            f"both route {values['route']} and backward_route {values['backward_route']}{apart}"
        )

    def _check_backward_route(self) -> None:
        """Refuse a route whose backward cannot use what is kept, or its "host_size"."""
        route, moves = self.route_of_backward, cast(str, self.backward_moves)
        if self.keep_gathered is True and route != self.route:
            routes = self.to_dict()
            raise ValueError(
                f"keep_gathered keeps what the forward's route {routes['route']!r} gathers, which "
                f"backward_route {routes['backward_route']!r} has no use for: leave one of them out"
            )
        if AUTO not in (route, moves) and self.keep_gathered is not True:
            size = self.sequence_parallel_size // self.degrees[0]
            check_host_size(read_placed(cast(Mapping[str, Any], route), size), size, moves)

    def _check_topology(self) -> None:
        check_source(self.topology)
        if not self.leaves_open:
            raise ValueError(
                f"topology {self.topology!r} has an effect only if another key is "
                f'"{AUTO}", and none is: leave it out'
            )


def checked(config: object) -> SequenceParallelConfig:
    """The config itself; a ValueError for anything else, such as a dict."""
    if isinstance(config, SequenceParallelConfig):
        return config
    raise ValueError(
        f"config must be a SequenceParallelConfig, got {config!r}: of a dict, "
        "SequenceParallelConfig.from_dict makes one"
    )
