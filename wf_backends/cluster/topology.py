"""The cluster as data: hosts, ranks and NICs, links, compute rates, memory.

Pure: standard library only. Ranks are numbered host by host, as every launcher does by default:
rank r is on host r // ranks_per_host. Units are seconds, bytes and FLOP/s; links are full duplex. A
topology file has its own units (`from_dict`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from reprlib import repr as short
from typing import Any

from wf_backends._validation import check_keys, nearest, positive

KERNEL_NAMES = ("reference", "sdpa", "flash")
MAX_MACHINES = 10**6  # hosts, ranks or NICs
MIN_NUMBER, MAX_NUMBER = 1e-30, 1e30  # in a file: with others bytes / rate may not be finite
REMEDY = (
    "Name another or correct its file; or measure one: wallfacer bench-links --out topology.json, "
    'or "topology": "measure" in a config'
)


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a NIC, or of a rank's connection to the other ranks of its host."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: float) -> float:
        """How long a message of `num_bytes` takes; a message of no bytes is not sent."""
        return self.latency_s + num_bytes / self.bytes_per_s if num_bytes else 0.0


@dataclass(frozen=True, slots=True)
class KernelRate:
    """A kernel's speed on one rank.

    seconds of a tile = call_s + FLOPs / flops_per_s
    """

    forward_flops_per_s: float
    backward_flops_per_s: float
    call_s: float = 0.0
    diagonal_keys: float = 0.0
    """Masked keys that are computed for each row of a tile that an edge of the mask crosses."""


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
    """Between ranks of one host. Every rank has its own link to the other ranks."""
    between: Link
    """Between hosts. All ranks of one NIC share it."""
    kernels: tuple[tuple[str, KernelRate], ...]
    """(name, rate) of each kernel; "auto" is priced by the first."""
    memory_bytes: float
    """The memory of one rank."""
    direct_links: bool = False
    """Whether every pair of ranks of a host has its own link (NVLink without a switch)."""
    exchange_s: float = 0.0
    """Seconds of an all-to-all of heads for tokens without its bytes; 0 = a message's latency, or
    the time for which its messages occupy a rank if that is more."""
    occupied: float = 0.0
    """The share of a message's time during which its sender and receiver cannot compute: 0 if
    tiles hide all of it, 1 if they hide nothing, as where ranks share a core."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            positive(f"topology key {name!r}", getattr(self, name), MAX_MACHINES)
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
        """Seconds for which messages that a rank sends, or receives, keep it from computing."""
        nearest = self.inside if self.ranks_per_host > 1 else self.between
        seconds = messages * nearest.latency_s + num_bytes / nearest.bytes_per_s
        return self.occupied / 2 * seconds  # half at the sender, half at the receiver

    def rate(self, kernel: str = "auto") -> KernelRate:
        """The rate of a kernel; of the first one listed for "auto".

        Raises:
            ValueError: if the topology has no rate for this kernel.
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
        """The topology with as many of these hosts as `size` ranks fill, or with a part of one.

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

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` takes."""
        return {
            "name": self.name,
            **{key: getattr(self, key) for key in _COUNTS},
            "inside": _write(self.inside, _LINK),
            "between": _write(self.between, _LINK),
            "kernels": {name: _write(rate, _RATE) for name, rate in self.kernels},
            **_write(self, _TOPOLOGY),
            **({"direct_links": True} if self.direct_links else {}),
        }


def is_host_by_host(hosts: Sequence[str]) -> bool:
    """Whether all hosts have the same number of ranks, and the ranks of a host are neighbours.

    Args:
        hosts: the host name of every rank, by rank.
    """
    per_host, remainder = divmod(len(hosts), len(set(hosts)))
    if remainder:
        return False
    return all(host == hosts[rank // per_host * per_host] for rank, host in enumerate(hosts))


def check_job(topology: Topology, hosts: Sequence[str], remedy: str = REMEDY) -> Topology:
    """The topology itself, if it describes the launched job.

    Args:
        hosts: the host name of every rank, by rank.
        remedy: what to do if it does not, for the error.

    Raises:
        ValueError: if the job has other ranks or hosts, or is not numbered host by host.
    """
    wrong = f"topology {topology.name!r} contradicts the job"
    if len(hosts) != topology.size:
        raise ValueError(
            f"{wrong}: it has {topology.hosts} hosts x {topology.ranks_per_host} ranks = "
            f"{topology.size}, the job {len(hosts)} ranks. {remedy}"
        )
    if len(set(hosts)) != topology.hosts:
        raise ValueError(
            f"{wrong}: it has {topology.hosts} hosts, the job {len(set(hosts))}: "
            f"{sorted(set(hosts))}. {remedy}"
        )
    for rank, host in enumerate(hosts):
        first = topology.host(rank) * topology.ranks_per_host
        if host != hosts[first]:
            raise ValueError(
                f"{wrong}: ranks {first} and {rank} should share host {topology.host(rank)}, but "
                f"run on {hosts[first]!r} and {host!r}. {remedy}"
            )
    return topology


_COUNTS = ("hosts", "ranks_per_host", "nics_per_host")
# Key in a file -> (field, factor, divisor), where field = number in the file * factor / divisor.
_Units = Mapping[str, tuple[str, float, float]]
_LINK: _Units = {"latency_us": ("latency_s", 1, 1e6), "gigabits_per_s": ("bytes_per_s", 1e9, 8)}
_RATE: _Units = {
    "forward_tflops": ("forward_flops_per_s", 1e12, 1),
    "backward_tflops": ("backward_flops_per_s", 1e12, 1),
    "call_us": ("call_s", 1, 1e6),
    "diagonal_keys": ("diagonal_keys", 1, 1),
}
_TOPOLOGY: _Units = {
    "memory_gib": ("memory_bytes", 2**30, 1),
    "exchange_us": ("exchange_s", 1, 1e6),
    "occupied": ("occupied", 1, 1),
}
_OPTIONAL = ("diagonal_keys", "exchange_us", "occupied", "direct_links")


def from_dict(block: Mapping[str, Any]) -> Topology:
    """The topology of a JSON or TOML object.

    Args:
        block: name, hosts, ranks_per_host, nics_per_host, memory_gib; inside and between as
            {latency_us, gigabits_per_s}; kernels as {kernel: {forward_tflops, backward_tflops,
            call_us, diagonal_keys (default: 0)}}; direct_links (default: false); exchange_us and
            occupied (default: 0).

    Raises:
        ValueError: naming the key that is unknown, missing or not a positive number.
    """
    keys = ("name", *_COUNTS, "inside", "between", "kernels", *_TOPOLOGY, "direct_links")
    block = check_keys("topology", block, keys, _OPTIONAL)
    name, direct_links = block["name"], block.get("direct_links", False)
    if not isinstance(name, str):
        raise ValueError(f"topology key 'name' must be a string, got {name!r}")
    if not isinstance(direct_links, bool):
        raise ValueError(f"topology key 'direct_links' must be true or false, got {direct_links!r}")
    rates = check_keys("kernels", block["kernels"], KERNEL_NAMES, optional=KERNEL_NAMES)
    kernels = ((key, KernelRate(**_read(f"kernels.{key}", rates[key], _RATE))) for key in rates)
    return Topology(
        name=name,
        **{key: block[key] for key in _COUNTS},
        inside=Link(**_read("inside", block["inside"], _LINK)),
        between=Link(**_read("between", block["between"], _LINK)),
        kernels=tuple(kernels),
        direct_links=direct_links,
        **_fields("", block, _TOPOLOGY),
    )


def _read(where: str, block: Any, units: _Units) -> dict[str, Any]:
    """The fields of a JSON object with the keys of `units`; `where` names it in errors."""
    return _fields(f"{where}.", check_keys(where, block, units, _OPTIONAL), units)


def _fields(prefix: str, block: Mapping[str, Any], units: _Units) -> dict[str, Any]:
    """The fields of the numbers of a JSON object. `prefix` stands before the keys in errors."""
    values = dict[str, float]()
    for key, (field, factor, divisor) in units.items():
        number = _check_number(prefix + key, block.get(key, 0), key in _OPTIONAL)
        values[field] = number * factor / divisor
    return values


def _write(value: object, units: _Units) -> dict[str, float]:
    """The inverse of `_fields`."""
    numbers = {key: getattr(value, field) * d / f for key, (field, f, d) in units.items()}
    return {key: number for key, number in numbers.items() if number or key not in _OPTIONAL}


def _check_number(key: str, value: object, may_be_zero: bool) -> float:
    """The value as a float: positive, within MIN_NUMBER and MAX_NUMBER, or 0 if that is allowed."""
    expected = "a positive number"
    if isinstance(value, int | float) and not isinstance(value, bool):
        if MIN_NUMBER <= value <= MAX_NUMBER or (may_be_zero and value == 0):
            return float(value)
        if value > 0:
            expected = f"from {MIN_NUMBER:g} to {MAX_NUMBER:g}"
    zero = " or 0" if may_be_zero else ""
    raise ValueError(f"topology key {key!r} must be {expected}{zero}, got {short(value)}")
