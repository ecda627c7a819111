"""Times of what all ranks of a job do together: work, messages, and both at once."""

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
LONG_S = 0.8  # of the message that a rate is measured by, if it need not be larger than MAX_BYTES
REPEATS = 5
FEW = 3  # repeats of what varies little
ENOUGH_S = 1.5  # messages that took so long together are not repeated
OVERLAP_ROUNDS = 4
LATENCY_ROUNDS = 20

Work = Callable[[], object]
Peers = tuple[int | None, int | None]  # the rank to send to, and the rank to receive from


@dataclass(frozen=True, slots=True)
class Timer:
    """Times what all ranks of `comm` do together. Every method is collective.

    Args:
        hurry_s: once the timer is so many seconds old, nothing is repeated.
    """

    comm: Communicator
    device: torch.device
    hurry_s: float = inf
    began: float = field(default_factory=time.perf_counter)

    def times(self, work: Work, repeats: int, enough_s: float = inf) -> list[float]:
        """Seconds of each run of `work` until the slowest rank is done; the same on all ranks.

        Args:
            enough_s: runs that took so long together are not repeated, unless there was only one.
        """
        found, late = list[float](), False
        while not found or not late and len(found) < repeats:
            sum_over_ranks(self.comm, torch.zeros(1))  # all start together
            start = time.perf_counter()
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            now = time.perf_counter()
            mine = torch.tensor([now - start, now - self.began], dtype=torch.float64)
            took, age = gather_small(self.comm, mine).amax(0).tolist()
            found.append(took)
            late = age > self.hurry_s
            if len(found) > 1 and sum(found) >= enough_s:
                break
        return found

    def per_run(self, work: Work, row_s: float) -> float:
        """Seconds of one run of `work`, from rows of runs that take at least `row_s`.

        In a short row, a rank that ends before another one begins has the cores for itself. The
        shorter of two rows counts.
        """
        count = 1
        while max(found := self.times(partial(_repeat, work, count), 2)) < row_s:
            count *= max(2, ceil(row_s / max(*found, row_s / GROWTH**3)))
        return min(found) / count

    def exchange(self, peers: Peers, num_bytes: int, repeats: int, rounds: int = 1) -> list[float]:
        """Seconds until every rank has sent to its target and received from its source."""
        post = self.make_post(peers, num_bytes)
        return self.times(partial(_repeat, lambda: post().wait(), rounds), repeats, ENOUGH_S)

    def make_post(self, peers: Peers, num_bytes: int) -> Callable[[], Pending]:
        """A function that posts one message to the target and one from the source."""
        target, source = peers
        size = max(1, num_bytes // 4)
        out, into = (torch.zeros(size, device=self.device) for _ in range(2))
        sends = [] if target is None else [(target, out)]
        recvs = [] if source is None else [(source, into)]
        return lambda: self.comm.post("bench", sends, recvs)

    def overlapped(self, post: Callable[[], Pending] | None, tile: Work, tiles: int) -> float:
        """Seconds of some rounds: post a message (if given), compute the tiles, wait."""

        def one_round() -> None:
            pending = post() if post else None
            _repeat(tile, tiles)
            if pending:
                pending.wait()

        return median(self.times(partial(_repeat, one_round, OVERLAP_ROUNDS), FEW, ENOUGH_S))

    def latency(self, peers: Peers) -> float:
        """Seconds of an exchange of a few bytes that follows another one.

        The ranks do not start at the same moment; the difference of a long and a short row of
        exchanges is free of that.
        """
        one, more = (min(self.exchange(peers, 4, FEW, n)) for n in (1, 1 + LATENCY_ROUNDS))
        return max(more - one, one / LATENCY_ROUNDS) / LATENCY_ROUNDS

    def rate(
        self, peers: Peers, latency_s: float, long_s: float = LONG_S, repeats: int = REPEATS
    ) -> float:
        """Bytes per second, from a message of `long_s` seconds and a shorter one.

            rate = (long - short) / (seconds of long - seconds of short)

        This is free of latency, and of bursts that a shaped link lets through at once. Seconds are
        medians. A short message that was delayed by chance would make the rate too high: it is
        never more than long / (seconds of long - latency).
        """
        long = self.bytes_for(peers, long_s)
        short = long // GROWTH**2
        long_took, short_took = (median(self.exchange(peers, n, repeats)) for n in (long, short))
        difference, alone = (max(long_took - s, long_took / 10) for s in (short_took, latency_s))
        return min((long - short) / difference, long / alone)

    def bytes_for(self, peers: Peers, long_s: float) -> int:
        """The size of a message whose bytes take about `long_s` seconds; at most MAX_BYTES.

        What a message takes whatever its size is left out: most of it where ranks share cores.
        """
        least = min(self.exchange(peers, 4, FEW))
        num_bytes, took = MIN_BYTES // GROWTH, 0.0
        while GROWTH**2 * took < long_s and num_bytes < MAX_BYTES:
            num_bytes *= GROWTH
            took = max(1e-9, min(self.exchange(peers, num_bytes, 2)) - least)
        return min(MAX_BYTES, int(num_bytes * max(1.0, long_s / took)))


def _repeat(work: Work, count: int) -> None:
    for _ in range(count):
        work()
