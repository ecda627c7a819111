"""What is priced, a workload's passes, and the price, a `Cost`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from wf_backends.cluster import KernelRate, Topology
from wf_backends.lowering import (
    BACKWARD_FLOPS,
    RowBytes,
    Shape,
    UlyssesGroups,
    backward_row_bytes,
    forward_row_bytes,
    mask_area,
)
from wf_backends.schedule import Mask

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Workload:
    """One attention call over the whole sequence."""

    shape: Shape
    seqlen: int
    mask: Mask = Mask()
    layout: str = "zigzag"
    kernel: str = "auto"
    keys: int | None = None
    """The keys' sequence length, for cross attention; None = that of the queries."""

    @property
    def num_keys(self) -> int:
        return self.seqlen if self.keys is None else self.keys

    @property
    def scores(self) -> int:
        """The (query, key) pairs that the mask lets through."""
        if self.num_keys != self.seqlen and self.mask.slices is None:
            return self.seqlen * self.num_keys
        return mask_area(self.mask, self.seqlen)


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """A workload on a cluster whose ranks exchange heads for tokens in groups of `degree` ranks.

    The ranks of a group are `stride` ranks apart. A rank's heads are computed in `chunks` parts,
    one after another.
    """

    workload: Workload
    topology: Topology
    degree: int = 1
    stride: int = 1
    chunks: int = 1

    @property
    def groups(self) -> UlyssesGroups:
        return UlyssesGroups(self.topology.size, self.degree, self.stride)

    @property
    def route_size(self) -> int:
        """The number of ranks of the route, each of which is a group of `degree` ranks."""
        return self.topology.size // self.degree

    @property
    def rate(self) -> KernelRate:
        return self.topology.rate(self.workload.kernel)

    @property
    def shape(self) -> Shape:
        """Sizes of what one rank computes on at a time, after the exchange."""
        shape, parts = self.workload.shape, self.degree * self.chunks
        return replace(shape, heads=shape.heads // parts, kv_heads=max(1, shape.kv_heads // parts))


@dataclass(frozen=True, slots=True)
class PassKind:
    """The forward or the backward, and which side walks in it."""

    name: str
    queries_walk: bool = False
    keep: bool = False
    """Whether what the forward gathers stays in memory, and the backward need not gather it."""

    def row_bytes(self, shape: Shape) -> RowBytes:
        """Bytes of one row of each side, as it is sent and as its results are."""
        if self.name == "forward":
            return forward_row_bytes(shape, self.queries_walk)
        return backward_row_bytes(shape, self.queries_walk, self.keep)

    def ordered(self, queries: T, keys: T) -> tuple[T, T]:
        """(the side that stays, the side that walks)."""
        return (keys, queries) if self.queries_walk else (queries, keys)

    def seconds_per_score(self, split: HeadSplit) -> float:
        """Seconds of one (query, key) pair, all heads of a rank: 2 b h (d + d_v) / rate."""
        shape, rate = split.shape, split.rate
        flops = 2 * shape.batch * shape.heads * (shape.head_dim + shape.value)
        if self.name == "forward":
            return flops / rate.forward_flops_per_s
        return BACKWARD_FLOPS * flops / rate.backward_flops_per_s


FORWARD = PassKind("forward")
BACKWARD_KEYS = PassKind("backward")
BACKWARD_QUERIES = PassKind("backward", queries_walk=True)


@dataclass(frozen=True, slots=True)
class Span:
    """Work from `start` to `stop`, in seconds from the start of the pass."""

    label: str
    kind: str
    """compute or transfer."""
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Cost:
    """What one or several passes cost. Bytes are those sent one way through the busiest link."""

    seconds: float = 0.0
    compute_s: float = 0.0
    """Seconds of computing, on the rank that computes longest."""
    transfer_s: float = 0.0
    """Seconds of transfers, one after another; of messages posted together, on the busiest link."""
    nic_bytes: float = 0.0
    inside_bytes: float = 0.0
    """Through one rank's connection inside its host."""
    memory_bytes: float = 0.0
    """Buffers beyond what the caller holds, at their peak, on the rank that needs most."""
    gathered_bytes: float = 0.0
    """The part of memory_bytes with queries and keys that a forward gathered and may keep."""
    spans: tuple[Span, ...] = ()
    """What the rank that ends last does, and when; empty in closed forms."""

    @property
    def exposed_s(self) -> float:
        """Seconds of transfers that nothing hides."""
        return self.seconds - self.compute_s

    def __add__(self, other: Cost) -> Cost:
        """The cost of this and then the other, one after another."""
        first_s = self.seconds
        later = (replace(s, start=s.start + first_s, stop=s.stop + first_s) for s in other.spans)
        return Cost(
            self.seconds + other.seconds,
            self.compute_s + other.compute_s,
            self.transfer_s + other.transfer_s,
            self.nic_bytes + other.nic_bytes,
            self.inside_bytes + other.inside_bytes,
            max(self.memory_bytes, other.memory_bytes),
            self.gathered_bytes + other.gathered_bytes,
            (*self.spans, *later),
        )
