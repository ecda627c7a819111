"""How a model's weights are split over an accelerator and its host, as plain data.

The output rows of a weight are split in three:  [ resident | streamed | host ]. The accelerator
computes resident rows, which stay in its memory, and streamed rows, which the link copies to it in
every pass; the host computes the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Literal

from wf_backends.hetegen.weights.law import Rates

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
        expert: the name of the expert that it belongs to; empty: it belongs to none.
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

    def use_probability(self, tokens: int) -> float:
        """The probability that at least one of `tokens` tokens is routed to it."""
        return 1 - (1 - self.routed) ** tokens


@dataclass(frozen=True, slots=True)
class Split:
    """How many rows of a linear are resident, and streamed in each phase; the host has the rest."""

    linear: Linear
    resident: int
    streamed_decode: int
    streamed_prefill: int

    def streamed(self, phase: Phase) -> int:
        return self.streamed_decode if phase == "decode" else self.streamed_prefill

    def host_start(self, phase: Phase) -> int:
        """The first row that the host computes."""
        return self.resident + self.streamed(phase)

    def alpha(self, phase: Phase) -> float:
        """The share of the rows that the host computes."""
        return 1 - self.host_start(phase) / self.linear.rows


@dataclass(frozen=True, slots=True)
class Job:
    """Rows [start, stop) of a linear, for one lane.

    A job begins after the previous job with the same slab has ended: rows are computed after they
    were copied, and a slab is overwritten after it was read.

    Attributes:
        lane: "link" copies the rows to a slab; "host" computes them in host memory; "accelerator"
            computes them from a slab, or resident rows without one.
        linear: its index in the plan.
        slab: its number; None: no slab.
    """

    lane: LaneName
    linear: int
    start: int
    stop: int
    slab: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """What a plan is made from.

    Attributes:
        linears: those of the model, in its order.
        rates: of the device's lanes for one token, with memory pinned as `pin_memory` says.
        accelerator_bytes: the accelerator's memory for weights and slabs.
        host_bytes: the host's memory for split weights and pinned memory.
        other_bytes: the accelerator's memory that tensors which are not split take.
        decode_tokens, prefill_tokens: tokens in a pass.
        alpha: the host's share of every linear; None: the best.
        slabs: their number.
        pin_memory: True: copies pass through pinned buffers as large as the slabs; "weights": the
            weights are pinned themselves; False: copies are pageable.
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
    pin_memory: bool | Literal["weights"] = True

    @property
    def linear_bytes(self) -> int:
        """Bytes of the accelerator's memory for resident rows and slabs."""
        return self.accelerator_bytes - self.other_bytes

    def tokens(self, phase: Phase) -> int:
        """Tokens in a pass."""
        return self.decode_tokens if phase == "decode" else self.prefill_tokens

    def rates_at(self, linear: Linear, phase: Phase) -> Rates:
        """The rates of a GEMM of the linear in a pass."""
        return self.rates.at(self.tokens(phase), linear.itemsize)

    def phase(self, tokens: int) -> Phase:
        """The phase of a call: prefill above the geometric mean of the phases' tokens."""
        return "decode" if tokens**2 <= self.decode_tokens * self.prefill_tokens else "prefill"


@dataclass(frozen=True)
class Plan:
    """Where every row lies, what computes it, and the predicted seconds.

    Attributes:
        request: what the plan was made from.
        splits: one for each linear, in the order of the model.
        slab_bytes, slabs: the size of a slab, and the number of slabs.
        decode_seconds, prefill_seconds: predicted for all split linears of a pass.
        streaming_seconds, host_seconds: predicted for a decoding pass if the host computed nothing,
            with the same memory, and if the host computed everything.
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
        """The rates that the plan was made from."""
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
        """Bytes of host memory: all split weights, and pinned buffers as large as the slabs."""
        pinned = self.slabs * self.slab_bytes if self.request.pin_memory is True else 0
        return sum(split.linear.nbytes for split in self.splits) + pinned

    def bytes_of(self, job: Job) -> int:
        """Bytes of a job's rows."""
        return (job.stop - job.start) * self.splits[job.linear].linear.row_bytes

    def seconds_of(self, job: Job, phase: Phase) -> float:
        """Predicted seconds of a job in a pass."""
        return self.bytes_of(job) / getattr(self._contended_rates[job.linear, phase], job.lane)

    @cached_property
    def _contended_rates(self) -> dict[tuple[int, Phase], Rates]:
        """(linear, phase) -> rates while all lanes that the linear uses work at the same time."""
        return {
            (i, phase): self.request.rates_at(split.linear, phase).contended(
                streams=split.streamed(phase) > 0, host_works=split.alpha(phase) > 0
            )
            for i, split in enumerate(self.splits)
            for phase in PHASES
        }
