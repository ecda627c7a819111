"""The topology of the running job, measured: links, NICs, kernel rates, memory.

A few seconds on every rank together; the result is the same on all ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median

import torch

from wf_backends.agree import HEADER, gather_small, sum_over_ranks
from wf_backends.bench_kernel import HEAD_DIM, KernelBench, Work
from wf_backends.comm.protocol import Communicator, Pending
from wf_backends.launched import check_job
from wf_backends.layout import make_layout
from wf_backends.presets import PRESETS
from wf_backends.topology import Link, Topology
from wf_backends.ulysses import heads_for_tokens, make_exchange

SMALLEST, LARGEST = 1 << 16, 1 << 24  # bytes of one message
GROWTH = 4
LONG_S = 0.8  # how long a message takes that a rate is measured by, if it need not be larger
SHORT_S = 0.2  # one inside a host, where nobody shapes the link
ROUGH_S = 0.1  # one that is only compared with others
REPEATS = 5
FEW = 3  # of what varies little
MIDDLE = 7  # of what the median is taken of
ENOUGH_S = 1.5  # what took this long is not repeated
HURRY_S = 6.5  # of measuring, after which nothing is repeated: ten seconds must do
ROUNDS_BESIDE = 4  # of tiles and messages
ROUNDS = 20  # exchanges in a row, of which one's latency is taken

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

    def seconds(self, work: Callable[[], object], repeats: int = REPEATS) -> float:
        """The shortest of several times: the best case is what a link can do.

        What else ran on the machine is not its property.
        """
        return min(self.times(work, repeats, ENOUGH_S))

    def times(self, work: Callable[[], object], repeats: int, enough_s: float = inf) -> list[float]:
        """Several times of some work, each until the slowest rank is done.

        Args:
            enough_s: what took this long together is repeated no more, unless it ran only once.
        """
        found, late = list[float](), False
        while not found or not late and len(found) < repeats:
            sum_over_ranks(self.comm, torch.zeros(1))  # all start together
            start = time.perf_counter()
            work()
            self.synchronize()
            took, since = self._slowest(start)
            found.append(took)
            late = since > self.hurry_s or len(found) > 1 and sum(found) >= enough_s
        return found

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
                for _ in range(tiles):
                    tile()
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


def measure(comm: Communicator, hosts: Sequence[str], device: torch.device) -> Topology:
    """The topology of a job.

    Args:
        comm: all ranks of the job. hosts: the host name of every rank, by rank.
        device: what this rank computes on and sends from.

    Raises:
        ValueError: if hosts have different numbers of ranks or are not numbered one by one.
    """
    count = len(set(hosts))
    per_host = len(hosts) // count
    name = f"measured on {hosts[0]}" + (f" and {count - 1} more" if count > 1 else "")
    nominal = replace(
        PRESETS["one-host"], name=name, hosts=count, ranks_per_host=per_host, nics_per_host=1
    )
    check_job(nominal, hosts)
    _connect(Meter(comm, device), per_host, count)
    meter = Meter(comm, device, HURRY_S)
    inside = _inside(meter, per_host) if per_host > 1 else nominal.inside
    between, nics = _between(meter, per_host) if count > 1 else (nominal.between, 1)
    agreement_s = _agreement(meter)
    exchange_s = _exchange(meter, per_host) if per_host > 1 else 0.0
    bench = KernelBench(device)
    rate = bench.rate(lambda work: meter.seconds(work, FEW))
    return replace(
        nominal,
        inside=inside,
        between=between,
        nics_per_host=nics,
        kernels=((bench.kernel.name, rate),),
        memory_bytes=_memory(device, per_host),
        agreement_s=agreement_s,
        exchange_s=exchange_s,
        occupied=_occupied(meter, per_host, bench.works(bench.sizes.beside)[0]),
    )


def _connect(meter: Meter, per_host: int, hosts: int) -> None:
    """A first message to everybody who is sent one, so that no measured one opens a connection."""
    for wanted, peers in ((per_host > 1, _neighbours), (hosts > 1, _across)):
        if wanted:
            meter.exchange(peers(meter, per_host), 4, 1)


def _exchange(meter: Meter, per_host: int) -> float:
    """Seconds of trading the heads of a few tokens among the ranks of a host, on all hosts at once.

    The median, as for the agreement.
    """
    comm = meter.comm
    counted, first = dict(comm.sent), comm.rank // per_host * per_host
    host = comm.view(range(first, first + per_host))
    trade = make_exchange(make_layout("contiguous", per_host, per_host), per_host, per_host)
    x = torch.zeros(1, 1, per_host, HEAD_DIM, device=meter.device)

    def work() -> object:
        return heads_for_tokens((x, x, x), (trade, trade, trade), host, "bench")

    times = meter.times(work, MIDDLE)
    comm.sent.clear()
    comm.sent.update(counted)  # no traffic of the job's
    return median(times)


def _occupied(meter: Meter, per_host: int, tile: Work) -> float:
    """The share of a message's time on the nearest link that tiles beside it do not hide.

    By as many tiles as take about as long.
    """
    if meter.comm.size == 1:
        return 0.0
    peers = _neighbours(meter, per_host) if per_host > 1 else _across(meter, per_host)
    post = meter.poster(peers, SMALLEST)
    alone = meter.beside(post, tile, 0)
    tiles = max(1, round(alone / meter.beside(None, tile, 1)))
    more = meter.beside(post, tile, tiles) - meter.beside(None, tile, tiles)
    return min(1.0, max(0.0, more / alone))


def _agreement(meter: Meter) -> float:
    """Seconds until all ranks have a header of each; 0 where it is exchanged once for all calls.

    The median: most of it is how long ranks take to be ready, which is no less in a real call.
    """
    if not meter.comm.on_host:
        return 0.0
    header = torch.zeros(HEADER, dtype=torch.int64)
    return median(meter.times(lambda: gather_small(meter.comm, header), MIDDLE))


def _inside(meter: Meter, per_host: int) -> Link:
    """All ranks of a host send to their neighbour at once, as in a ring."""
    peers = _neighbours(meter, per_host)
    latency = meter.latency(peers)
    return Link(latency, meter.rate(peers, latency, SHORT_S))


def _between(meter: Meter, per_host: int) -> tuple[Link, int]:
    """One NIC's link, and how many NICs a host has: first one rank of a host sends, then all."""
    peers = _across(meter, per_host)
    first = (None, None) if meter.comm.rank % per_host else peers
    latency = meter.latency(first)
    together = meter.rate(peers, latency)
    if per_host == 1:
        return Link(latency, together), 1
    gain = per_host * together / meter.rate(first, latency, ROUGH_S, FEW)
    nics = nearest_divisor(per_host, gain)
    return Link(latency, together * per_host / nics), nics


def _neighbours(meter: Meter, per_host: int) -> Peers:
    """The ranks after and before this one on its host."""
    rank = meter.comm.rank
    first = rank // per_host * per_host
    return first + (rank + 1 - first) % per_host, first + (rank - 1 - first) % per_host


def _across(meter: Meter, per_host: int) -> Peers:
    """Those like this one on the hosts after and before its own."""
    rank, size = meter.comm.rank, meter.comm.size
    return (rank + per_host) % size, (rank - per_host) % size


def nearest_divisor(n: int, value: float) -> int:
    """The divisor of n that is nearest to `value`, by ratio."""
    fits = [d for d in range(1, n + 1) if n % d == 0]
    return min(fits, key=lambda d: max(d / max(value, 1e-9), value / d))


def _memory(device: torch.device, per_host: int) -> float:
    """Bytes of one rank: its GPU's, or its share of the host's."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / per_host
