"""The links of the running job, measured: latency, rate, NICs of a host, overlap with tiles."""

from __future__ import annotations

from wf_backends.cluster.timer import FEW_REPEATS, MIN_BYTES, Peers, Timer, Work
from wf_backends.cluster.topology import Link
from wf_backends.schedule import divisors

INSIDE_MESSAGE_S = 0.2  # of a message inside a host, where the link has no traffic shaping
ROUGH_MESSAGE_S = 0.1  # of a message that is only compared with another one


def open_connections(timer: Timer, per_host: int) -> None:
    """Send first messages, so that no measured message has to open a connection."""
    if per_host > 1:
        timer.exchange(_neighbours(timer, per_host), 4, 1)
    if timer.comm.size > per_host:
        timer.exchange(_counterparts(timer, per_host), 4, 1)


def measure_inside(timer: Timer, per_host: int) -> Link:
    """The link inside a host: all its ranks send to their neighbour at once, as in a ring."""
    peers = _neighbours(timer, per_host)
    latency = timer.latency(peers)
    return Link(latency, timer.rate(peers, latency, INSIDE_MESSAGE_S))


def measure_between(timer: Timer, per_host: int) -> tuple[Link, int]:
    """(link of one NIC, NICs of a host): a host sends faster by their number if all ranks send."""
    peers = _counterparts(timer, per_host)
    one_per_host = peers if timer.comm.rank % per_host == 0 else (None, None)
    latency = timer.latency(one_per_host)
    rate_of_all = timer.rate(peers, latency)  # of one rank
    if per_host == 1:
        return Link(latency, rate_of_all), 1
    rate_of_one = timer.rate(one_per_host, latency, ROUGH_MESSAGE_S, FEW_REPEATS)
    nics = nearest_divisor(per_host, per_host * rate_of_all / rate_of_one)
    return Link(latency, rate_of_all * per_host / nics), nics


def measure_occupied(timer: Timer, per_host: int, tile: Work) -> float:
    """The share of a message's time, on the nearest link, that overlapped tiles do not hide.

    As many tiles are computed during the message as take about as long.
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
    local_rank = timer.comm.rank % per_host
    first = timer.comm.rank - local_rank
    return first + (local_rank + 1) % per_host, first + (local_rank - 1) % per_host


def _counterparts(timer: Timer, per_host: int) -> Peers:
    """The ranks with the same local rank on the next and on the previous host."""
    rank, size = timer.comm.rank, timer.comm.size
    return (rank + per_host) % size, (rank - per_host) % size


def nearest_divisor(n: int, value: float) -> int:
    """The divisor of n that is nearest to `value`, by ratio."""
    return min(divisors(n), key=lambda d: max(d / max(value, 1e-9), value / d))
