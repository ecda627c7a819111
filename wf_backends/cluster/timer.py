"""Times of what all ranks of a job do together: computing, messages, and both at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import ceil, inf
from statistics import median

import torch

from wf_backends.comm import Communicator, Pending, gather_small, sum_over_ranks

MIN_BYTES, MAX_BYTES = 1 << 16, 1 << 24  # of a message
GROWTH = 4  # from one message size to the next
LONG_MESSAGE_S = 0.8  # of the message that a rate is measured by, if MAX_BYTES allow it
FEW_REPEATS = 3  # of what varies little
MAX_TOTAL_S = 1.5  # of the repeats of a message
OVERLAPS_IN_A_ROW = 4
EXCHANGES_IN_A_ROW = 20

Work = Callable[[], object]
Peers = tuple[int | None, int | None]  # the rank to send to, and the rank to receive from


@dataclass(frozen=True, slots=True)
class Timer:
    """Times what all ranks of `comm` do together. Every method is collective.

    Args:
        no_repeats_after_s: seconds after `began` from which on nothing is repeated.
    """

    comm: Communicator
    device: torch.device
    no_repeats_after_s: float = inf
    began: float = field(default_factory=time.perf_counter)

    def times(self, work: Work, repeats: int, max_total_s: float = inf) -> list[float]:
        """Seconds of each run of `work` until the slowest rank is done; the same on all ranks.

        Args:
            repeats: how many runs there are at most; there is at least one.
            max_total_s: two or more runs that took so long in all are not repeated.
        """
        times = list[float]()
        for _ in range(repeats):
            sum_over_ranks(self.comm, torch.zeros(1))  # all start together
            start = time.perf_counter()
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            now = time.perf_counter()
            of_rank = torch.tensor([now - start, now - self.began], dtype=torch.float64)
            seconds, age_s = gather_small(self.comm, of_rank).amax(0).tolist()
            times.append(seconds)
            is_enough = len(times) > 1 and sum(times) >= max_total_s
            if is_enough or age_s > self.no_repeats_after_s:
                break
        return times

    def per_run(self, work: Work, series_s: float) -> float:
        """Seconds of one run of `work`, from series of runs that take at least `series_s`.

        In a short series, a rank that ends before another one begins has the cores for itself. The
        shorter of two series counts.
        """
        count, times = 1, self.times(work, 2)
        while max(times) < series_s:
            count *= max(2, ceil(series_s / max(*times, series_s / GROWTH**3)))
            times = self.times(partial(_repeat, work, count), 2)
        return min(times) / count

    def exchange(self, peers: Peers, num_bytes: int, repeats: int, count: int = 1) -> list[float]:
        """Seconds until every rank has sent to its target and received from its source."""
        post = self.make_post(peers, num_bytes)
        return self.times(partial(_repeat, lambda: post().wait(), count), repeats, MAX_TOTAL_S)

    def make_post(self, peers: Peers, num_bytes: int) -> Callable[[], Pending]:
        """A function that posts one message to the target and one from the source."""
        target, source = peers
        size = max(1, num_bytes // 4)
        sent, received = (torch.zeros(size, device=self.device) for _ in range(2))
        sends = [] if target is None else [(target, sent)]
        recvs = [] if source is None else [(source, received)]
        return lambda: self.comm.post("bench", sends, recvs)

    def overlapped(self, post: Callable[[], Pending] | None, tile: Work, tiles: int) -> float:
        """Seconds of OVERLAPS_IN_A_ROW times: post a message (unless None), compute tiles, wait."""

        def overlap() -> None:
            pending = post() if post else None
            _repeat(tile, tiles)
            if pending:
                pending.wait()

        overlaps = partial(_repeat, overlap, OVERLAPS_IN_A_ROW)
        return median(self.times(overlaps, FEW_REPEATS, MAX_TOTAL_S))

    def latency(self, peers: Peers) -> float:
        """Seconds of an exchange of a few bytes that follows another exchange.

        The ranks do not start at the same moment; the difference of a long and a short series of
        exchanges is free of that.
        """
        short_s = min(self.exchange(peers, 4, FEW_REPEATS))
        long_s = min(self.exchange(peers, 4, FEW_REPEATS, 1 + EXCHANGES_IN_A_ROW))
        return max(long_s - short_s, short_s / EXCHANGES_IN_A_ROW) / EXCHANGES_IN_A_ROW

    def rate(
        self, peers: Peers, latency_s: float, long_s: float = LONG_MESSAGE_S, repeats: int = 5
    ) -> float:
        """Bytes per second, from a message of `long_s` seconds and a shorter message.

            rate = (long - short) / (seconds of long - seconds of short)

        This is free of latency, and of bursts that traffic shaping lets through at once. Seconds
        are medians. If the short message was delayed by chance, the rate would be too high: it is
        at most long / (seconds of long - latency).
        """
        long = self.bytes_for(peers, long_s)
        short = long // GROWTH**2
        long_took, short_took = (median(self.exchange(peers, n, repeats)) for n in (long, short))
        min_s = long_took / 10  # of the differences: a rate is finite and positive
        rate = (long - short) / max(long_took - short_took, min_s)
        return min(rate, long / max(long_took - latency_s, min_s))

    def bytes_for(self, peers: Peers, long_s: float) -> int:
        """The size of a message whose bytes take about `long_s` seconds; at most MAX_BYTES.

        The time of an empty message is left out: where ranks share cores it is most of the time.
        """
        empty_s = min(self.exchange(peers, 4, FEW_REPEATS))
        num_bytes, bytes_s = MIN_BYTES // GROWTH, 0.0
        while GROWTH**2 * bytes_s < long_s and num_bytes < MAX_BYTES:
            num_bytes *= GROWTH
            bytes_s = max(1e-9, min(self.exchange(peers, num_bytes, 2)) - empty_s)
        return min(MAX_BYTES, int(num_bytes * max(1.0, long_s / bytes_s)))


def _repeat(work: Work, count: int) -> None:
    for _ in range(count):
        work()
