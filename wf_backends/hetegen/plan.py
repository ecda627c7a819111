"""How a model is split over an accelerator and its host, as plain data.

Pure: standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import floor

from wf_backends.hetegen.jobs import Accel, Copy, Host, Job, JobMaker, Phase, Rows
from wf_backends.hetegen.law import Rates, Weight, best_alpha, residency, seconds_per_byte
from wf_backends.hetegen.simulated import Simulated, run_passes

SLABS_OF_LARGEST = (1, 2, 4, 8)  # slabs that the streamed rows of the largest linear may fill
PHASES: tuple[Phase, ...] = ("decode", "prefill")


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

    def alpha(self, phase: Phase) -> float:
        """The share of the rows that the host computes."""
        return 1 - (self.resident + self.streamed(phase)) / self.linear.rows

    @property
    def resident_bytes(self) -> int:
        return self.resident * self.linear.row_bytes


@dataclass(frozen=True)
class Plan:
    """What lies where, who computes what, and the seconds that this should take.

    Attributes:
        splits: one for each linear, in the order of the model.
        rates: of the device, for one token.
        decode_tokens, prefill_tokens: in a pass. A pass over more than their geometric mean
            counts as prefill.
        slab_bytes, slabs: the size of a slab, and how many there are.
        other_bytes: of what is not split and lies in the accelerator's memory.
        decode_seconds, prefill_seconds: of all split linears in a pass.
        streaming_seconds, host_seconds: of a decoding pass, if weights were only streamed, with
            the same memory, and if the host computed everything.
    """

    splits: tuple[Split, ...]
    rates: Rates
    decode_tokens: int
    prefill_tokens: int
    slab_bytes: int
    slabs: int
    other_bytes: int
    decode_seconds: float = 0.0
    prefill_seconds: float = 0.0
    streaming_seconds: float = 0.0
    host_seconds: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether everything is resident."""
        return all(split.resident == split.linear.rows for split in self.splits)

    @property
    def accelerator_bytes(self) -> int:
        """Bytes of the accelerator's memory that weights and slabs take."""
        resident = sum(split.resident_bytes for split in self.splits)
        return self.other_bytes + resident + self.slabs * self.slab_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory: all weights that are split, and as much pinned as slabs take."""
        weights = sum(split.linear.nbytes for split in self.splits)
        return weights + self.slabs * self.slab_bytes

    def phase(self, tokens: int) -> Phase:
        """The phase of a call over so many tokens."""
        border = self.decode_tokens * self.prefill_tokens
        return "decode" if tokens**2 <= border else "prefill"

    def seconds_of(self, job: Job, phase: Phase) -> float:
        """What a Copy, Host or Accel of a pass should take."""
        assert isinstance(job, Copy | Host | Accel)
        rates = self._rates_of[job.linear, phase]
        rate = {Copy: rates.link, Host: rates.host, Accel: rates.accelerator}[type(job)]
        return (job.stop - job.start) * self.splits[job.linear].linear.row_bytes / rate

    @cached_property
    def _rates_of(self) -> dict[tuple[int, Phase], Rates]:
        return {
            (i, phase): self._rates(split, phase)
            for i, split in enumerate(self.splits)
            for phase in PHASES
        }

    def _rates(self, split: Split, phase: Phase) -> Rates:
        tokens = self.decode_tokens if phase == "decode" else self.prefill_tokens
        shared = split.streamed(phase) > 0, split.alpha(phase) > 0
        return self.rates.at(tokens, split.linear.itemsize).contended(*shared)

    def job_maker(self) -> JobMaker:
        """A new maker of jobs, with empty slabs."""
        return JobMaker(
            [
                Rows(
                    s.linear.rows,
                    s.resident,
                    {phase: s.streamed(phase) for phase in PHASES},
                    max(1, self.slab_bytes // s.linear.row_bytes),
                    s.linear.expert,
                )
                for s in self.splits
            ],
            self.slabs,
        )

    def simulate(self, phases: Sequence[Phase]) -> tuple[list[float], Simulated]:
        """The seconds of some passes in a row, and the jobs in virtual time."""
        took, device, maker = [], self.simulated("decode"), self.job_maker()
        for phase in phases:
            device.seconds = self.simulated(phase).seconds
            tokens = self.decode_tokens if phase == "decode" else self.prefill_tokens
            order = used([split.linear for split in self.splits], tokens)
            took += run_passes(device, maker, order, [phase])
        return took, device

    def simulated(self, phase: Phase) -> Simulated:
        """Lanes in virtual time with the rates of a phase."""
        return Simulated(lambda job: self.seconds_of(job, phase), self.rates.call_seconds)

    def to_json(self) -> str:
        """The plan as JSON; an infinite rate is null."""
        words = asdict(self)
        words["rates"] = {k: None if v == float("inf") else v for k, v in words["rates"].items()}
        return json.dumps(words, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            ValueError: if it is no such text.
        """
        try:
            words = json.loads(text)
            rates = {k: float("inf") if v is None else v for k, v in words.pop("rates").items()}
            splits = [Split(Linear(**s.pop("linear")), **s) for s in words.pop("splits")]
            return cls(splits=tuple(splits), rates=Rates(**rates), **words)
        except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"not the JSON of a plan: {error!r}") from error


def used(linears: Sequence[Linear], tokens: int) -> list[int]:
    """The linears that a pass calls, in order: of experts as many as are used on average."""
    order, due, drawn = [], 0.5, {"": True}
    for i, linear in enumerate(linears):
        if linear.expert not in drawn:
            due += linear.uses(tokens)
            drawn[linear.expert] = due >= 1
            due -= drawn[linear.expert]
        if drawn[linear.expert]:
            order.append(i)
    return order


def host_rows(rows: int, resident: int, rates: Rates, alpha: float | None) -> int:
    """How many rows the host computes: of whole numbers the best by the law, or near `alpha`."""
    if alpha is not None:
        return min(round(alpha * rows), rows - resident)
    best = best_alpha(resident / rows, rates) * rows
    around = {floor(best), min(floor(best) + 1, rows - resident)}
    return min(around, key=lambda host: seconds_per_byte(host / rows, resident / rows, rates))


def resident_rows(
    linears: Sequence[Linear], weights: list[Weight], nbytes: float, alpha: float | None
) -> list[int]:
    """`law.residency` in whole rows, which together take at most `nbytes`."""
    shares = residency(weights, max(nbytes, 0), alpha)
    rows = [floor(share * x.rows + 1e-9) for share, x in zip(shares, linears, strict=True)]
    left = nbytes - sum(n * x.row_bytes for n, x in zip(rows, linears, strict=True))
    for i in sorted(range(len(linears)), key=lambda i: -weights[i].saved_per_byte):
        if rows[i] < shares[i] * linears[i].rows - 1e-9 and linears[i].row_bytes <= left:
            rows[i] += 1
            left -= linears[i].row_bytes
    return rows
