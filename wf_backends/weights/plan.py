"""How a model is split over an accelerator and its host, as plain data.

Rows of a weight lie as  [ resident | streamed | the host's ].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Literal

from wf_backends.weights.law import Rates

Phase = Literal["decode", "prefill"]
PHASES: tuple[Phase, ...] = ("decode", "prefill")
LaneName = Literal["link", "host", "accelerator"]
LANE_NAMES: tuple[LaneName, ...] = ("link", "host", "accelerator")


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight that may be split by its output rows.

    Attributes:
        name: of its module.
        rows, columns: output and input features.
        itemsize: bytes of an element.
        expert: the expert it belongs to, an empty string for none.
        routed: the share of the tokens that are routed to it.
    """

    name: str
    rows: int
    columns: int
    itemsize: int
    expert: str = ""
    routed: float = 1.0

    @property
    def row_bytes(self) -> int:
        return self.columns * self.itemsize

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    def uses(self, tokens: int) -> float:
        """How likely any of `tokens` tokens uses it."""
        return 1 - (1 - self.routed) ** tokens


@dataclass(frozen=True, slots=True)
class Split:
    """Rows of a linear:  [ resident | streamed | the host's ], the last two by phase."""

    linear: Linear
    resident: int
    streamed_decode: int
    streamed_prefill: int

    def streamed(self, phase: Phase) -> int:
        return self.streamed_decode if phase == "decode" else self.streamed_prefill

    def host_start(self, phase: Phase) -> int:
        """The first row of the host's."""
        return self.resident + self.streamed(phase)

    def alpha(self, phase: Phase) -> float:
        """The share of the rows that the host computes."""
        return 1 - self.host_start(phase) / self.linear.rows


@dataclass(frozen=True, slots=True)
class Job:
    """Rows [start, stop) of a linear, for one lane.

    It comes after the job before it that has its slab: rows are computed when they were copied,
    and a slab is written when it was read.

    Attributes:
        lane: "link" copies the rows to a slab; "host" computes them where they lie;
            "accelerator" computes them from a slab, or resident ones.
        slab: None for no slab.
    """

    lane: LaneName
    linear: int
    start: int
    stop: int
    slab: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """What a plan is asked for.

    Attributes:
        linears: of the model, in its order.
        rates: of the device's lanes, for one token, with copies as they are.
        accelerator_bytes: of its memory, for weights and slabs.
        host_bytes: of the host's memory, for weights that are split and pinned memory.
        other_bytes: what is not split takes of the accelerator's memory.
        decode_tokens, prefill_tokens: in a pass.
        alpha: the host's share of every linear; None for the best.
        slabs: how many there are.
        pinned: whether copies pass through pinned memory.
    """

    linears: tuple[Linear, ...]
    rates: Rates
    accelerator_bytes: int
    host_bytes: float = inf
    other_bytes: int = 0
    decode_tokens: int = 1
    prefill_tokens: int = 512
    alpha: float | None = None
    slabs: int = 3
    pinned: bool = True

    @property
    def room(self) -> int:
        """Bytes for the linears and slabs."""
        return self.accelerator_bytes - self.other_bytes

    def tokens(self, phase: Phase) -> int:
        """Tokens in a pass."""
        return self.decode_tokens if phase == "decode" else self.prefill_tokens

    def rates_at(self, linear: Linear, phase: Phase) -> Rates:
        """Those of a GEMM of the linear in a pass."""
        return self.rates.at(self.tokens(phase), linear.itemsize)

    def phase(self, tokens: int) -> Phase:
        """The phase of a call over so many tokens: prefill above the geometric mean of the two."""
        return "decode" if tokens**2 <= self.decode_tokens * self.prefill_tokens else "prefill"


@dataclass(frozen=True)
class Plan:
    """What lies where, who computes what, and the seconds that this should take.

    Attributes:
        request: what was asked for.
        splits: one for each linear, in the order of the model.
        slab_bytes, slabs: the size of a slab, and how many there are.
        decode_seconds, prefill_seconds: of all split linears in a pass.
        streaming_seconds, host_seconds: of a decoding pass, if weights were only streamed, with
            the same memory, and if the host computed everything.
    """

    request: Request
    splits: tuple[Split, ...]
    slab_bytes: int
    slabs: int
    decode_seconds: float = 0.0
    prefill_seconds: float = 0.0
    streaming_seconds: float = 0.0
    host_seconds: float = 0.0

    @property
    def rates(self) -> Rates:
        """Those that were planned with."""
        return self.request.rates

    @property
    def fits(self) -> bool:
        """Whether everything is resident."""
        return all(split.resident == split.linear.rows for split in self.splits)

    @property
    def accelerator_bytes(self) -> int:
        """Bytes of the accelerator's memory that weights and slabs take."""
        resident = sum(split.resident * split.linear.row_bytes for split in self.splits)
        return self.request.other_bytes + resident + self.slabs * self.slab_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory: all weights that are split, and pinned memory as slabs take."""
        pinned = self.slabs * self.slab_bytes * self.request.pinned
        return sum(split.linear.nbytes for split in self.splits) + pinned

    def bytes_of(self, job: Job) -> int:
        """Bytes of its rows."""
        return (job.stop - job.start) * self.splits[job.linear].linear.row_bytes

    def seconds_of(self, job: Job, phase: Phase) -> float:
        """What a job of a lane should take in a pass."""
        return self.bytes_of(job) / getattr(self._rates_of[job.linear, phase], job.lane)

    @cached_property
    def _rates_of(self) -> dict[tuple[int, Phase], Rates]:
        """(linear, phase) -> rates while the lanes that it uses work at the same time."""
        return {
            (i, phase): self.request.rates_at(split.linear, phase).contended(
                streams=split.streamed(phase) > 0, host_works=split.alpha(phase) > 0
            )
            for i, split in enumerate(self.splits)
            for phase in PHASES
        }
