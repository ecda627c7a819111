"""The law of HeteGen (arXiv 2403.01164): which share of a linear's rows the host computes.

Of a weight of W bytes the share rho lies in the accelerator's memory for good, the host computes
the share alpha where it lies, and the rest streams to the accelerator:

    T = max( alpha W / host,  (1 - alpha - rho) W / link,  (1 - rho) W / memory,
             (1 - alpha) W / accelerator )

The four parts work at the same time; the third counts where the host and the link both work, which
may serve less together than one of them alone.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, fields, replace
from math import inf, isfinite

from wf_backends._validation import is_real

ROUNDING = 1e-12  # a share below it is none


@dataclass(frozen=True, slots=True)
class Rates:
    """What the parts of a machine take, in weight bytes a second for a GEMM over one token.

    Attributes:
        link: host memory that is pinned -> accelerator.
        host: the host's GEMM, reading weights where they lie.
        accelerator: the accelerator's GEMM.
        memory: of the host's memory, what its GEMM and the link read together while both work; no
            less than the link alone.
        host_beside_link: the host's GEMM while the link works, too, which then has the rest of
            `memory`; inf: both slow down in proportion.
        staging: host memory that is not pinned -> pinned -> accelerator, both at a time.
        host_flops, accelerator_flops: operations a second, which bound a GEMM over many tokens.
        call_seconds: from the end of one call of a split linear to the next: what the model does
            in between, and waiting for lanes.
    """

    link: float
    host: float
    accelerator: float
    memory: float = inf
    host_beside_link: float = inf
    staging: float = inf
    host_flops: float = inf
    accelerator_flops: float = inf
    call_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if name == "call_seconds":
                if not (is_real(value) and 0 <= value < inf):
                    raise ValueError(f"{name} must be at least 0 seconds, got {value!r}")
            elif not (is_real(value) and value > 0):
                raise ValueError(f"{name} must be a positive rate, got {value!r}")
            if name in ("link", "host") and not isfinite(value):
                raise ValueError(f"{name} must be a finite rate, got {value!r}")

    def at(self, tokens: int, itemsize: int) -> Rates:
        """The rates of a GEMM over `tokens` tokens with weights of `itemsize` bytes.

        It takes the longer of reading the weights and of 2 operations a weight and token. The
        link's rate is then that of copies which are staged.
        """
        operations = 2 * tokens / itemsize  # for each byte
        return replace(
            self,
            link=min(self.link, self.staging),
            host=min(self.host, self.host_flops / operations),
            host_beside_link=min(self.host_beside_link, self.host_flops / operations),
            accelerator=min(self.accelerator, self.accelerator_flops / operations),
        )

    def unpinned(self) -> Rates:
        """The rates of copies from memory that is not pinned: the driver copies twice."""
        return replace(self, link=min(self.link, self.staging) / 2)

    def contended(self, streams: bool, host_works: bool) -> Rates:
        """The rates while the link streams or the host's GEMM works; where both do, they share."""
        if not (streams and host_works):
            return replace(self, memory=inf)
        slower = min(1.0, self.memory / (self.link + self.host))
        link, host = self.link * slower, self.host * slower
        if self.host_beside_link < self.memory < inf:
            host = min(self.host, self.host_beside_link)
            link = min(self.link, self.memory - host)
        return replace(self, link=link, host=host, memory=inf)

    @property
    def served(self) -> float:
        """The bytes a second of weights that are not resident, as the best alpha has it."""
        return max(self.link, self.host, min(self.link + self.host, self.memory))


def seconds_per_byte(alpha: float, resident: float, rates: Rates) -> float:
    """T / W of the law, `rates` being those at the tokens at hand."""
    streamed = max(0.0, 1 - alpha - resident)
    both = alpha > 0 and streamed > ROUNDING
    return max(
        alpha / rates.host,
        streamed / rates.link,
        both * (1 - resident) / rates.memory,
        (1 - alpha) / rates.accelerator,
    )


def best_alpha(resident: float, rates: Rates) -> float:
    """The alpha for which the law's T is least: 0, 1 - rho, or between them

        alpha = min( 1 - rho,  max( (1 - rho) / (1 + link / host),  1 / (1 + accelerator / host) ) )

    alpha / host grows with alpha and the other terms fall, so T is least where the first is as
    large as the largest of the others, or where nothing is left to stream.
    """
    with_link = (1 - resident) / (1 + rates.link / rates.host)
    with_accelerator = 1 / (1 + rates.accelerator / rates.host)
    between = min(1 - resident, max(with_link, with_accelerator))
    alphas = between, 1 - resident, 0.0
    return min(alphas, key=lambda alpha: seconds_per_byte(alpha, resident, rates))


def resident_limits(rates: Rates) -> tuple[float, float]:
    """(rho up to which each resident byte saves time, rho beyond which one costs time).

    With the best alpha T / W = max( (1 - rho) / served, 1 / (accelerator + host) ), until 1 - rho
    is less than the alpha of the second term.
    """
    together = rates.accelerator + rates.host
    useful = 1 - rates.served / together if isfinite(together) else 1.0
    harmless = 1 / (1 + rates.host / rates.accelerator)
    return min(max(useful, 0.0), harmless), harmless


@dataclass(frozen=True, slots=True)
class WeightUse:
    """A weight for which memory is shared out.

    Attributes:
        nbytes: its size.
        uses: how often it is used in a pass, on average; below 1 for an expert.
        rates: those at the tokens at hand.
    """

    nbytes: float
    uses: float
    rates: Rates


def residency(weights: list[WeightUse], nbytes: float, alpha: float | None = None) -> list[float]:
    """The share of each weight that is resident, where `nbytes` bytes may be: the least total time.

    Bytes go to where one saves the most time; weights where it saves as much get equal shares,
    since T is convex in rho. What is left then goes where it costs nothing.

    Args:
        weights: in any order.
        nbytes: at most this much is resident.
        alpha: of all weights, if it is not for the law to choose; nothing of alpha is resident.
    """
    groups: dict[tuple[float, float, float], list[int]] = defaultdict(list)
    for i, weight in enumerate(weights):
        limits = resident_limits(weight.rates) if alpha is None else (1 - alpha, 1 - alpha)
        saved_per_byte = weight.uses / weight.rates.served
        groups[saved_per_byte, *limits].append(i)
    shares = [0.0] * len(weights)
    for turn in (1, 2):  # what saves time; what costs none
        for key in sorted(groups, reverse=True):
            size = sum(weights[i].nbytes for i in groups[key])
            level = shares[groups[key][0]]
            raised = min(key[turn], level + nbytes / size)
            nbytes -= (raised - level) * size
            for i in groups[key]:
                shares[i] = raised
    return shares
