"""What all ranks of a job do together, timed: work, messages, and both at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import ceil, inf
from statistics import median

import torch

from wf_backends.comm import Communicator, Pending, gather_small, sum_over_ranks

SMALLEST, LARGEST = 1 << 16, 1 << 24  # bytes of one message
GROWTH = 4
LONG_S = 0.8  # how long a message takes that a rate is measured by, if it need not be larger
REPEATS = 5
FEW = 3  # of what varies little
ENOUGH_S = 1.5  # what took this long is not repeated
ROUNDS_BESIDE = 4  # of tiles and messages
ROUNDS = 20  # exchanges in a row, of which one's latency is taken

Work = Callable[[], object]
Peers = tuple[int | None, int | None]  # whom a rank sends to, and whom it receives from


@dataclass(frozen=True, slots=True)
class Meter:
    """Times what all ranks do together.

    Args:
        hurry_s: seconds after which nothing is repeated, whatever else is asked for.
    """

    comm: Communicator
    device: torch.device
    hurry_s: float = inf
    began: float = field(default_factory=time.perf_counter)

    def times(self, work: Work, repeats: int, enough_s: float = inf) -> list[float]:
        """Several times of some work, each until the slowest rank is done.

        Args:
            enough_s: what took this long together is repeated no more, unless it ran only once.
        """
        return self.timed(work, repeats, enough_s)[0]

    def timed(self, work: Work, repeats: int, enough_s: float = inf) -> tuple[list[float], bool]:
        """(as `times`, whether it is too late to repeat anything: the same on all ranks)."""
        found, late = list[float](), False
        while not found or not late and len(found) < repeats:
            sum_over_ranks(self.comm, torch.zeros(1))  # all start together
            start = time.perf_counter()
            work()
            self.synchronize()
            took, since = self._slowest(start)
            found.append(took)
            late = since > self.hurry_s
            if len(found) > 1 and sum(found) >= enough_s:
                break
        return found, late

    def one(self, work: Work, row_s: float) -> float:
        """The shorter of two times of one piece of work, of rows of it that take `row_s` at least.

        Ranks do not start together, and ranks that share cores do not run together: one that is
        done before another begins seems faster than they all are at once.
        """
        count, (found, late) = 1, self.timed(work, 1)
        while found[0] < row_s:
            count *= max(2, ceil(row_s / max(found[0], row_s / GROWTH**3)))
            found, late = self.timed(partial(_row, work, count), 1)
        again = [] if late else self.times(partial(_row, work, count), 1)
        return min(found + again) / count

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _slowest(self, start: float) -> tuple[float, float]:
        """Seconds since `start`, and since the meter began, of the ranks for which it is longest.

        The same on all ranks: so they stop repeating together.
        """
        now = time.perf_counter()
        mine = torch.tensor([now - start, now - self.began], dtype=torch.float64)
        took, since = gather_small(self.comm, mine).amax(0).tolist()
        return took, since

    def exchange(self, peers: Peers, num_bytes: int, repeats: int, rounds: int = 1) -> list[float]:
        """Seconds until every rank has sent to its target and received from its source."""
        post = self.poster(peers, num_bytes)

        def work() -> None:
            for _ in range(rounds):
                post().wait()

        return self.times(work, repeats, ENOUGH_S)

    def beside(self, post: Callable[[], Pending] | None, tile: Work, tiles: int) -> float:
        """Seconds of rounds of tiles, in each a message posted before them and waited for after."""

        def work() -> None:
            for _ in range(ROUNDS_BESIDE):
                pending = post() if post else None
                _row(tile, tiles)
                if pending:
                    pending.wait()

        return median(self.times(work, FEW, ENOUGH_S))

    def poster(self, peers: Peers, num_bytes: int) -> Callable[[], Pending]:
        """What posts a message to the target and one from the source."""
        target, source = peers
        size = max(1, num_bytes // 4)
        out, into = (torch.zeros(size, device=self.device) for _ in range(2))
        sends = [] if target is None else [(target, out)]
        recvs = [] if source is None else [(source, into)]
        return lambda: self.comm.post_control("bench", sends, recvs)

    def latency(self, peers: Peers) -> float:
        """Seconds of one more exchange of a few bytes in a row, as the hops of a pass are.

        The ranks do not start together, which must not count each time.
        """
        first, row = (min(self.exchange(peers, 4, FEW, rounds)) for rounds in (1, 1 + ROUNDS))
        return max(row - first, first / ROUNDS) / ROUNDS

    def rate(
        self, peers: Peers, latency_s: float, long_s: float = LONG_S, repeats: int = REPEATS
    ) -> float:
        """Bytes a second, from a message of `long_s` seconds and a shorter one.

        What the longer one takes more is free of latency, and of bursts that a shaped link lets
        through at once. Medians: the shortest of either would be further from it, and the
        difference further still. Never more than all bytes in all the time but the latency: a
        shorter message that happened to take long would make a link faster than it is.
        """
        long = self.bytes_for(peers, long_s)
        short = long // GROWTH**2
        took, before = (median(self.exchange(peers, size, repeats)) for size in (long, short))
        by_more, by_all = (max(took - less, took / 10) for less in (before, latency_s))
        return min((long - short) / by_more, long / by_all)

    def bytes_for(self, peers: Peers, long_s: float) -> int:
        """The size of a message whose bytes take about `long_s` seconds, or the largest.

        Beside what a message takes whatever its size: most of its time where ranks share cores.
        """
        least = min(self.exchange(peers, 4, FEW))

        def seconds(num_bytes: int) -> float:
            return max(1e-9, min(self.exchange(peers, num_bytes, 2)) - least)

        num_bytes = SMALLEST
        took = seconds(num_bytes)
        while GROWTH**2 * took < long_s and num_bytes < LARGEST:
            num_bytes *= GROWTH
            took = seconds(num_bytes)
        return min(LARGEST, int(num_bytes * max(1.0, long_s / took)))


def _row(work: Work, count: int) -> None:
    for _ in range(count):
        work()
