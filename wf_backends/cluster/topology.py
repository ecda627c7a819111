# pyright: reportUnnecessaryIsInstance=false
"""The machine as data: hosts, ranks and NICs, links, compute rates, memory.

Pure: standard library only. Ranks are numbered host by host, as every launcher does by default:
rank r is on host r // ranks_per_host. Seconds, bytes and FLOP/s throughout; links are full duplex.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from reprlib import repr as short
from types import MappingProxyType
from typing import Any, cast

from wf_backends._validation import nearest

KERNEL_NAMES = ("reference", "sdpa", "flash")


@dataclass(frozen=True, slots=True)
class Link:
    """One way of one NIC, or of one rank's connection to the others of its host."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: float) -> float:
        """How long `num_bytes` sent at once take; nothing at all takes no time."""
        return self.latency_s + num_bytes / self.bytes_per_s if num_bytes else 0.0


@dataclass(frozen=True, slots=True)
class KernelRate:
    """A kernel's speed on one rank: seconds = call_s + FLOPs / rate, so that small tiles cost."""

    forward_flops_per_s: float
    backward_flops_per_s: float
    call_s: float = 0.0
    diagonal_keys: float = 0.0
    """Where an edge of the mask crosses a tile: the keys that a row is computed with in vain."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The cluster that a job runs on.

    Raises:
        ValueError: naming the field, if a number is not positive or nics_per_host does not divide
            ranks_per_host.
    """

    name: str
    hosts: int
    ranks_per_host: int
    nics_per_host: int
    """Ranks of a host share its NICs evenly, neighbours together."""
    inside: Link
    """Between two ranks of one host; what one rank sends, or receives, goes through its own."""
    between: Link
    """Between hosts; what all ranks of one NIC send, or receive, goes through it."""
    kernels: tuple[tuple[str, KernelRate], ...]
    memory_bytes: float
    """What one rank has."""
    direct_links: bool = False
    """Whether every two ranks of a host have a link of their own, which `inside` then describes
    (NVLink without a switch)."""
    agreement_s: float = 0.0
    """What the ranks' check that all pass the same takes, once a call; 0 where it is remembered."""
    exchange_s: float = 0.0
    """What trading heads for tokens takes at least, beside its bytes; 0 = a message's latency."""
    occupied: float = 0.0
    """The share of a message's time on the nearest link for which it keeps the ranks at its ends
    from computing: 0 if tiles hide all of it, 1 if nothing of it, as where ranks share a core."""

    def __post_init__(self) -> None:
        for name in ("hosts", "ranks_per_host", "nics_per_host"):
            _whole(name, getattr(self, name))
        if self.ranks_per_host % self.nics_per_host:
            raise ValueError(
                f"nics_per_host must divide ranks_per_host {self.ranks_per_host} (every rank "
                f"sends through one NIC), got {self.nics_per_host}"
            )
        if self.occupied > 1:
            raise ValueError(f"occupied must be a share, from 0 to 1, got {self.occupied}")
        if not self.kernels:
            raise ValueError("kernels must name at least one kernel and its rate")

    @property
    def size(self) -> int:
        """All ranks."""
        return self.hosts * self.ranks_per_host

    @property
    def ranks_per_nic(self) -> int:
        return self.ranks_per_host // self.nics_per_host

    def host(self, rank: int) -> int:
        """The host that a rank is on."""
        return rank // self.ranks_per_host

    def nic(self, rank: int) -> int:
        """The NIC that a rank sends through, numbered over all hosts."""
        return rank // self.ranks_per_nic

    def hold_s(self, num_bytes: float, messages: int = 1) -> float:
        """How long messages that leave, or that arrive, keep a rank from computing."""
        nearest = self.inside if self.ranks_per_host > 1 else self.between
        each = messages * nearest.latency_s + num_bytes / nearest.bytes_per_s
        return self.occupied / 2 * each  # the other half is that of the far end

    def rate(self, kernel: str = "auto") -> KernelRate:
        """The rate of a kernel; of the first one listed for "auto".

        Raises:
            ValueError: if the topology says nothing about this kernel.
        """
        known = dict(self.kernels)
        if kernel == "auto":
            return self.kernels[0][1]
        if kernel not in known:
            raise ValueError(
                f"topology {self.name!r} has rates for {list(known)}, got kernel "
                f"{kernel!r}{nearest(kernel, known)}"
            )
        return known[kernel]

    def with_ranks(self, size: int) -> Topology:
        """As many of these hosts as `size` ranks fill; part of one host for fewer.

        Raises:
            ValueError: if the ranks do not fill whole hosts.
        """
        if size == self.size:
            return self
        if size > self.ranks_per_host and size % self.ranks_per_host:
            raise ValueError(
                f"{size} ranks do not fill hosts of {self.ranks_per_host} ({self.name!r}): take "
                f"a multiple of {self.ranks_per_host}, or set ranks_per_host in a topology file"
            )
        if size >= self.ranks_per_host:
            return replace(self, hosts=size // self.ranks_per_host)
        nics = max(1, size // self.ranks_per_nic)
        nics = nics if size % nics == 0 else 1
        return replace(self, hosts=1, ranks_per_host=size, nics_per_host=nics)

    @property
    def _measured(self) -> dict[str, float]:
        return {
            "agreement_us": self.agreement_s * 1e6,
            "exchange_us": self.exchange_s * 1e6,
            "occupied": self.occupied,
        }

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` takes."""
        return {
            "name": self.name,
            "hosts": self.hosts,
            "ranks_per_host": self.ranks_per_host,
            "nics_per_host": self.nics_per_host,
            "inside": _link_words(self.inside),
            "between": _link_words(self.between),
            "kernels": {name: _rate_words(rate) for name, rate in self.kernels},
            "memory_gib": self.memory_bytes / 2**30,
            **({"direct_links": True} if self.direct_links else {}),
            **{key: value for key, value in self._measured.items() if value},
        }


LINK_KEYS = ("latency_us", "gigabits_per_s")
OPTIONAL: Mapping[str, Any] = MappingProxyType(
    {"direct_links": False, "agreement_us": 0, "exchange_us": 0, "occupied": 0}
)
RATE_KEYS = ("forward_tflops", "backward_tflops", "call_us")
DIAGONAL = "diagonal_keys"
LEAST, MOST = 1e-30, 1e30  # of a number: beyond, bytes over rates are no longer finite
MOST_OF_A_KIND = 10**6  # hosts, ranks and NICs


def from_dict(words: Mapping[str, Any]) -> Topology:
    """The topology of a JSON or TOML object.

    Args:
        words: name, hosts, ranks_per_host, nics_per_host, memory_gib; inside and between as
            {latency_us, gigabits_per_s}; kernels as {kernel: {forward_tflops, backward_tflops,
            call_us, diagonal_keys (default: 0)}}; direct_links (default: false); agreement_us,
            exchange_us and occupied (default: 0).

    Raises:
        ValueError: naming the key that is unknown, missing or no positive number.
    """
    counts = ("hosts", "ranks_per_host", "nics_per_host")
    keys = ("name", *counts, "inside", "between", "kernels", "memory_gib")
    words = {**OPTIONAL, **_check_keys("topology", words, keys, tuple(OPTIONAL))}
    if not isinstance(words["name"], str):
        raise ValueError(f"topology key 'name' must be a string, got {words['name']!r}")
    if not isinstance(words["direct_links"], bool):
        raise ValueError(
            f"topology key 'direct_links' must be true or false, got {words['direct_links']!r}"
        )
    return Topology(
        name=words["name"],
        **{key: _whole(key, words[key]) for key in counts},
        inside=_link("inside", words["inside"]),
        between=_link("between", words["between"]),
        kernels=_rates(words["kernels"]),
        memory_bytes=_number("memory_gib", words["memory_gib"]) * 2**30,
        direct_links=words["direct_links"],
        agreement_s=_number("agreement_us", words["agreement_us"], zero=True) / 1e6,
        exchange_s=_number("exchange_us", words["exchange_us"], zero=True) / 1e6,
        occupied=_number("occupied", words["occupied"], zero=True),
    )


def _link(key: str, words: Any) -> Link:
    words = _check_keys(key, words, LINK_KEYS)
    latency, rate = (_number(f"{key}.{name}", words[name]) for name in LINK_KEYS)
    return Link(latency / 1e6, rate * 1e9 / 8)


def _link_words(link: Link) -> dict[str, float]:
    return dict(zip(LINK_KEYS, (link.latency_s * 1e6, link.bytes_per_s * 8 / 1e9), strict=True))


def _rates(words: Any) -> tuple[tuple[str, KernelRate], ...]:
    """The rates of kernels by their names, in the order in which they are listed."""
    if not isinstance(words, Mapping):
        raise ValueError(f"topology key 'kernels' must be an object of kernels, got {words!r}")
    rates = cast(Mapping[str, Any], words)
    _refuse_unknown("kernels", "kernel", rates, KERNEL_NAMES)
    return tuple((name, _rate(f"kernels.{name}", rates[name])) for name in rates)


def _rate(key: str, words: Any) -> KernelRate:
    words = {DIAGONAL: 0, **_check_keys(key, words, RATE_KEYS, (DIAGONAL,))}
    forward, backward, call = (_number(f"{key}.{name}", words[name]) for name in RATE_KEYS)
    diagonal = _number(f"{key}.{DIAGONAL}", words[DIAGONAL], zero=True)
    return KernelRate(forward * 1e12, backward * 1e12, call / 1e6, diagonal)


def _rate_words(rate: KernelRate) -> dict[str, float]:
    values = (rate.forward_flops_per_s / 1e12, rate.backward_flops_per_s / 1e12, rate.call_s * 1e6)
    words = dict(zip(RATE_KEYS, values, strict=True))
    return words | ({DIAGONAL: rate.diagonal_keys} if rate.diagonal_keys else {})


def _check_keys(
    where: str, words: Any, keys: Sequence[str], optional: Sequence[str] = ()
) -> Mapping[str, Any]:
    allowed = [*keys, *optional]
    if not isinstance(words, Mapping):
        raise ValueError(f"{where} must be an object with the keys {allowed}, got {words!r}")
    given = cast(Mapping[str, Any], words)
    _refuse_unknown(where, "key", given, allowed)
    for key in keys:
        if key not in given:
            raise ValueError(f"{where}: {key!r} is missing. Keys: {allowed}")
    return given


def _refuse_unknown(where: str, kind: str, names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            told = f"unknown {kind} {name!r}{nearest(name, known)} {kind.title()}s: {list(known)}"
            raise ValueError(f"{where}: {told}")


def _number(key: str, value: object, zero: bool = False) -> float:
    """A number beyond 0, or 0 if that is allowed, with which one can compute."""
    wanted = "a positive number"
    if isinstance(value, int | float) and not isinstance(value, bool):
        if LEAST <= value <= MOST or (zero and value == 0):
            return float(value)
        if value > 0:
            wanted = f"from {LEAST:g} to {MOST:g}"
    raise ValueError(f"topology key {key!r} must be {wanted}{zero * ' or 0'}, got {short(value)}")


def _whole(key: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"topology key {key!r} must be a positive integer, got {value!r}")
    if value > MOST_OF_A_KIND:
        most = f"at most {MOST_OF_A_KIND}"
        raise ValueError(f"topology key {key!r} must be {most}, got {short(value)}")
    return value
