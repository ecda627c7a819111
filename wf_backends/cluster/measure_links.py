"""The links of the running job, measured: latency, rate, NICs of a host, and what tiles hide."""

from __future__ import annotations

from wf_backends.cluster.timer import FEW, MIN_BYTES, Peers, Timer, Work
from wf_backends.cluster.topology import Link

INSIDE_S = 0.2  # of a message inside a host, where nobody shapes the link
ROUGH_S = 0.1  # of a message that is only compared with another one


def open_connections(timer: Timer, per_host: int) -> None:
    """Send first messages, so that no message that is measured opens a connection."""
    if per_host > 1:
        timer.exchange(_neighbours(timer, per_host), 4, 1)
    if timer.comm.size > per_host:
        timer.exchange(_counterparts(timer, per_host), 4, 1)


def measure_inside(timer: Timer, per_host: int) -> Link:
    """The link inside a host: all its ranks send to their neighbour at once, as in a ring."""
    peers = _neighbours(timer, per_host)
    latency = timer.latency(peers)
    return Link(latency, timer.rate(peers, latency, INSIDE_S))


def measure_between(timer: Timer, per_host: int) -> tuple[Link, int]:
    """(link of one NIC, NICs of a host): first one rank of every host sends, then all do."""
    peers = _counterparts(timer, per_host)
    alone = (None, None) if timer.comm.rank % per_host else peers
    latency = timer.latency(alone)
    together = timer.rate(peers, latency)
    if per_host == 1:
        return Link(latency, together), 1
    gain = per_host * together / timer.rate(alone, latency, ROUGH_S, FEW)
    nics = nearest_divisor(per_host, gain)
    return Link(latency, together * per_host / nics), nics


def measure_occupied(timer: Timer, per_host: int, tile: Work) -> float:
    """The share of a message's time, on the nearest link, that tiles beside it do not hide.

    Beside the message run as many tiles as take about as long.
    """
    if timer.comm.size == 1:
        return 0.0
    peers = (_neighbours if per_host > 1 else _counterparts)(timer, per_host)
    post = timer.make_post(peers, MIN_BYTES)
    message = timer.overlapped(post, tile, 0)
    tiles = max(1, round(message / timer.overlapped(None, tile, 1)))
    exposed = timer.overlapped(post, tile, tiles) - timer.overlapped(None, tile, tiles)
    return min(1.0, max(0.0, exposed / message))


def _neighbours(timer: Timer, per_host: int) -> Peers:
    """The ranks after and before this one on its host."""
    first, at = timer.comm.rank // per_host * per_host, timer.comm.rank % per_host
    return first + (at + 1) % per_host, first + (at - 1) % per_host


def _counterparts(timer: Timer, per_host: int) -> Peers:
    """The ranks with this one's place on the hosts after and before its own."""
    rank, size = timer.comm.rank, timer.comm.size
    return (rank + per_host) % size, (rank - per_host) % size


def nearest_divisor(n: int, value: float) -> int:
    """The divisor of n that is nearest to `value`, by ratio."""
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    return min(divisors, key=lambda d: max(d / max(value, 1e-9), value / d))
