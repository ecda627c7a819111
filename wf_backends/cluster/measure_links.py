"""The topology of the running job, measured: links, NICs, kernel rates, memory.

A few seconds on every rank together; the result is the same on all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch

from wf_backends.cluster.job import check_job
from wf_backends.cluster.measure_kernels import HEAD_DIM, KernelBench
from wf_backends.cluster.presets import PRESETS
from wf_backends.cluster.timer import FEW, SMALLEST, Meter, Peers, Work
from wf_backends.cluster.topology import Link, Topology
from wf_backends.comm import HEADER, Communicator, gather_small
from wf_backends.runtime import heads_for_tokens, make_head_exchange
from wf_backends.schedule import make_layout

SHORT_S = 0.2  # how long a message takes inside a host, where nobody shapes the link
ROUGH_S = 0.1  # one that is only compared with others
MIDDLE = 7  # times of what the median is taken of
HURRY_S = 6.0  # of measuring, after which nothing is repeated: ten seconds must do


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
    rate = bench.rate(meter.one)
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
    trade = make_head_exchange(make_layout("contiguous", per_host, per_host), per_host, per_host)
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
