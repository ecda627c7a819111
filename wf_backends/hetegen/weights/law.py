"""The law of HeteGen (arXiv 2403.01164): which share of a linear's rows the host computes.

A weight has W bytes. The share rho is resident in the accelerator's memory, the share alpha is
computed by the host in its own memory, and the rest is streamed to the accelerator:

    T = max( host_call + alpha W / host,  (1 - alpha - rho) W / link,  (1 - rho) W / memory,
             (1 - alpha) W / accelerator )

The four terms overlap in time. host_call, the way of inputs to the host and of outputs back, counts
only where the host works. The third term, the host's memory, counts only while the host and the
link both work: together they may get less of its bandwidth than one of them alone.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, fields, replace
from itertools import product
from math import inf, isfinite

from wf_backends._validation import is_real

ROUNDING = 1e-12  # a smaller share is 0


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of a machine, in bytes of weights per second.

    Attributes:
        link: copies from pinned host memory to the accelerator.
        host: a GEMM over one token on the host.
        accelerator: a GEMM over one token on the accelerator.
        memory: what the host's GEMM and the link read together while both work; at least `link`.
        host_beside_link: the host's GEMM while the link works too, which then gets the rest of
            `memory`. inf: both slow down in proportion.
        staging: copies of weights to the accelerator as the lane does them: from pageable memory
            through pinned memory, with the two copies overlapped, or from pinned weights.
        host_flops, accelerator_flops: operations per second, which bound a GEMM over many tokens.
        call_seconds: from the end of one call of a split linear to the next: what the model
            computes in between, and waiting for lanes.
        host_call_seconds: what a host's GEMM takes beside reading its rows: its input's way to
            the host, waking a thread, its output's way back.
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
    host_call_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if name.endswith("_seconds"):
                if not (is_real(value) and 0 <= value < inf):
                    raise ValueError(f"{name} must be at least 0 seconds, got {value!r}")
            elif not (is_real(value) and value > 0):
                raise ValueError(f"{name} must be a positive rate, got {value!r}")
            if name in ("link", "host") and not isfinite(value):
                raise ValueError(f"{name} must be a finite rate, got {value!r}")

    def at(self, tokens: int, itemsize: int) -> Rates:
        """The rates of a GEMM over `tokens` tokens with weights of `itemsize` bytes.

        A GEMM takes the longer of reading its weights and of 2 operations per weight and token.
        Copies are staged, so that the link is no faster than `staging`.
        """
        operations = 2 * tokens / itemsize  # per byte
        return replace(
            self,
            link=min(self.link, self.staging),
            host=min(self.host, self.host_flops / operations),
            host_beside_link=min(self.host_beside_link, self.host_flops / operations),
            accelerator=min(self.accelerator, self.accelerator_flops / operations),
        )

    def unpinned(self) -> Rates:
        """The rates with copies from pageable memory, which the driver copies twice."""
        return replace(self, link=min(self.link, self.staging) / 2)

    def contended(self, streams: bool, host_works: bool) -> Rates:
        """The rates while the link streams or the host works; if both do, they share `memory`."""
        if not (streams and host_works):
            return replace(self, memory=inf)
        slowdown = min(1.0, self.memory / (self.link + self.host))
        link, host = self.link * slowdown, self.host * slowdown
        if self.host_beside_link < self.memory < inf:
            host = min(self.host, self.host_beside_link)
            link = min(self.link, self.memory - host)
        return replace(self, link=link, host=host, memory=inf)

    @property
    def served(self) -> float:
        """Bytes per second at which non-resident weights are processed, with the best alpha."""
        return max(self.link, self.host, min(self.link + self.host, self.memory))


def seconds_per_byte(alpha: float, resident: float, rates: Rates, nbytes: float = inf) -> float:
    """T / W of the law, with rho = `resident` and the rates for a pass's tokens (`Rates.at`).

    Args:
        nbytes: W, over which host_call is spread; inf: it does not count.
    """
    streamed = max(0.0, 1 - alpha - resident)
    both_work = alpha > 0 and streamed > ROUNDING
    return max(
        rates.host_call_seconds / nbytes + alpha / rates.host if alpha > 0 else 0.0,
        streamed / rates.link,
        (1 - resident) / rates.memory if both_work else 0.0,
        (1 - alpha) / rates.accelerator,
    )


def best_alpha(resident: float, rates: Rates, nbytes: float = inf) -> float:
    """The alpha with the smallest T of the law: 0, 1 - rho, or in between, with c = host_call / W

        alpha = min( 1 - rho,  max( ((1 - rho) / link - c) / (1 / link + 1 / host),
                                    (1 / accelerator - c) / (1 / accelerator + 1 / host) ) )

    The first term grows with alpha and the others fall, so T is smallest where it equals the
    largest of the others, or where nothing is left to stream.

    Args:
        nbytes: as in `seconds_per_byte`.
    """
    link, host, accelerator = 1 / rates.link, 1 / rates.host, 1 / rates.accelerator
    call = rates.host_call_seconds / nbytes
    with_link = ((1 - resident) * link - call) / (link + host)
    with_accelerator = (accelerator - call) / (accelerator + host)
    balanced = max(0.0, min(1 - resident, max(with_link, with_accelerator)))
    alphas = balanced, 1 - resident, 0.0
    return min(alphas, key=lambda alpha: seconds_per_byte(alpha, resident, rates, nbytes))


def resident_limits(rates: Rates) -> tuple[float, float]:
    """(rho up to which a resident byte saves time, rho above which a resident byte costs time).

    With the best alpha T / W = max( (1 - rho) / served, 1 / (accelerator + host) ), until 1 - rho
    is less than the alpha of the second term. host_call does not count.
    """
    useful = 1 - rates.served / (rates.accelerator + rates.host)
    harmless = 1 / (1 + rates.host / rates.accelerator)
    return min(max(useful, 0.0), harmless), harmless


@dataclass(frozen=True, slots=True)
class WeightUse:
    """A weight that may get a part of the accelerator's memory.

    Attributes:
        nbytes: its size.
        uses: how often a pass uses it, on average; below 1 for an expert.
        rates: for the number of tokens of a pass (`Rates.at`).
    """

    nbytes: float
    uses: float
    rates: Rates


def residency(weights: list[WeightUse], nbytes: float, alpha: float | None = None) -> list[float]:
    """The resident share of each weight, with the smallest total time of all weights.

    Bytes go first to the weights for which a byte saves the most time; weights for which it saves
    the same get equal shares, since T is convex in rho. The rest goes where it costs no time.

    Args:
        weights: in any order.
        nbytes: the memory for all resident shares together.
        alpha: the host's share of every weight, which is never resident; None: the best alpha.
    """
    # (seconds saved per byte, useful share, harmless share) -> indices of weights
    groups: dict[tuple[float, float, float], list[int]] = defaultdict(list)
    for i, weight in enumerate(weights):
        limits = resident_limits(weight.rates) if alpha is None else (1 - alpha, 1 - alpha)
        saved_per_byte = weight.uses / weight.rates.served
        groups[saved_per_byte, *limits].append(i)
    shares = [0.0] * len(weights)
    for limit, group in product((1, 2), sorted(groups, reverse=True)):  # first what saves time
        members = groups[group]
        group_bytes = sum(weights[i].nbytes for i in members)
        share = shares[members[0]]
        raised = min(group[limit], share + nbytes / group_bytes)
        nbytes -= (raised - share) * group_bytes
        for i in members:
            shares[i] = raised
    return shares
