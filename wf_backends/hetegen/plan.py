"""How a model is split over an accelerator and its host, as plain data.

Pure: standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf

from wf_backends.hetegen.jobs import PHASES, Job, JobMaker, Linear, Phase, Split
from wf_backends.hetegen.law import Rates


@dataclass(frozen=True, slots=True)
class Request:
    """What a plan is asked for.

    Attributes:
        linears: of the model, in its order.
        device_rates: of its lanes, for one token, where copies pass through pinned memory.
        accelerator_bytes: of its memory, for weights and slabs.
        host_bytes: of the host's memory, for weights that are split and pinned memory.
        other_bytes: what is not split takes of the accelerator's memory.
        decode_tokens, prefill_tokens: in a pass.
        alpha: the host's share of every linear; None for the best.
        slabs: how many there are.
        pinned: whether copies pass through pinned memory.
    """

    linears: tuple[Linear, ...]
    device_rates: Rates
    accelerator_bytes: int
    host_bytes: float = inf
    other_bytes: int = 0
    decode_tokens: int = 1
    prefill_tokens: int = 512
    alpha: float | None = None
    slabs: int = 3
    pinned: bool = True

    @property
    def rates(self) -> Rates:
        """Of the lanes, for one token, with copies as they are."""
        return self.device_rates if self.pinned else self.device_rates.unpinned()

    @property
    def room(self) -> int:
        """Bytes for the linears and slabs."""
        return self.accelerator_bytes - self.other_bytes

    def tokens(self, phase: Phase) -> int:
        """Tokens in a pass."""
        return self.decode_tokens if phase == "decode" else self.prefill_tokens

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
            (i, phase): self.rates.at(self.request.tokens(phase), split.linear.itemsize).contended(
                streams=split.streamed(phase) > 0, host_works=split.alpha(phase) > 0
            )
            for i, split in enumerate(self.splits)
            for phase in PHASES
        }

    def job_maker(self) -> JobMaker:
        """A new maker of jobs, with empty slabs."""
        return JobMaker(self.splits, self.slabs, self.slab_bytes)
