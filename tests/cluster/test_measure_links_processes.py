"""The topology of a real job: measured in seconds, the same on every rank, kept by host list."""

from __future__ import annotations

import time
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import run_processes, run_threads
from wf_backends.cluster.discover import job_hosts, measured_topology
from wf_backends.cluster.measure_links import measure_occupied
from wf_backends.cluster.timer import MAX_BYTES, Timer
from wf_backends.comm import Communicator

pytestmark = pytest.mark.processes


def measure_twice(
    comm: Communicator, hosts: list[str], folder: str
) -> tuple[Any, Any, float, float]:
    torch.set_num_threads(1)
    assert job_hosts(comm, hosts[comm.rank]) == hosts
    start, began = time.process_time(), time.perf_counter()
    first = measured_topology(comm, hosts, torch.device("cpu"), Path(folder))
    took = time.process_time() - start  # of a core: other tests may run beside this one
    lasted = time.perf_counter() - began
    assert not comm.sent  # what is measured is no traffic of the job's
    return first, measured_topology(comm, hosts, torch.device("cpu"), Path(folder)), took, lasted


@pytest.mark.parametrize(("hosts", "per_host"), [(["a", "b"], 1), (["a", "a", "b", "b"], 2)])
def test_a_job_is_measured_once(hosts: list[str], per_host: int, tmp_path: Path) -> None:
    results = run_processes(len(hosts), measure_twice, hosts, str(tmp_path))
    (topology, known), (again, kept), took, lasted = results[0]
    assert not known and kept
    assert all(
        first == (topology, False) and second == (again, True) for first, second, *_ in results
    )
    assert topology == again
    assert took < 10
    assert (topology.hosts, topology.ranks_per_host) == (len(set(hosts)), per_host)
    assert 0 < topology.inside.latency_s < lasted / 10 and topology.inside.bytes_per_s > 1e6
    assert 0 < topology.agreement_s < lasted / 10
    assert 0 <= topology.occupied <= 1 and topology.rate().diagonal_keys >= 0
    assert (0 < topology.exchange_s < lasted / 10) == (per_host > 1)
    assert topology.kernels[0][0] == "sdpa" and topology.rate().forward_flops_per_s > 1e8
    assert len(list(tmp_path.iterdir())) == 1


def timed(comm: Communicator, after_s: float) -> int:
    timer = Timer(comm, torch.device("cpu"), after_s)
    return len(timer.times(lambda: time.sleep(0.4 * (comm.rank == 2)), repeats=4))


@pytest.mark.parametrize(("after_s", "times"), ((10.0, 4), (0.1, 1), (0.7, 2)))
def test_nothing_is_repeated_late_on_any_rank(after_s: float, times: int) -> None:
    """Though only one rank takes so long."""
    assert run_threads(3, timed, after_s) == [times] * 3


@pytest.mark.parametrize("late", (False, True))
@pytest.mark.parametrize(("series_s", "within"), ((0.2, 0.06), (1.0, 0.015)))
def test_ranks_that_do_not_run_together_seem_no_faster(
    series_s: float, within: float, late: bool
) -> None:
    """10 ms of a row are over before the last rank begins; a row may take longer than it must."""
    ran = list[None]()

    class Apart(Timer):
        """A millisecond for each piece of work."""

        def times(self, work: Any, repeats: int, max_total_s: float = inf) -> list[float]:
            ran.clear()
            work()
            return [max(0.0, 1e-3 * len(ran) - 0.01)] * (1 if late else repeats)

    def one(comm: Communicator) -> float:
        return Apart(comm, torch.device("cpu")).per_run(lambda: ran.append(None), series_s)

    assert run_threads(1, one) == [pytest.approx(1e-3, rel=within)]


class Steady(Timer):
    """A link of so many bytes a second, whose messages take 10 ms more."""

    RATE = 1e6
    BURST = 0

    def exchange(self, peers: Any, num_bytes: int, repeats: int, rounds: int = 1) -> list[float]:
        shaped = max(0, num_bytes - self.BURST)
        return [rounds * (0.01 + shaped / self.RATE)] * repeats


class Bursting(Steady):
    """The first bytes of every message take no time."""

    BURST = 1 << 14


class Hiccup(Steady):
    """A message that is no long one takes 30 ms more than it should."""

    def exchange(self, peers: Any, num_bytes: int, repeats: int, rounds: int = 1) -> list[float]:
        times = super().exchange(peers, num_bytes, repeats, rounds)
        return [took + 0.03 * (1 << 12 < num_bytes < 1 << 16) for took in times]


@pytest.mark.parametrize("link", (Steady, Bursting, Hiccup))
def test_a_rate_is_free_of_latency_of_bursts_and_of_hiccups(link: type[Steady]) -> None:
    (timer,) = run_threads(1, lambda comm: link(comm, torch.device("cpu")))
    latency = timer.latency((0, 0))
    assert latency == pytest.approx(0.01, rel=1e-3)
    assert timer.rate((0, 0), latency) == pytest.approx(Steady.RATE, rel=1e-4)


class Fast(Steady):
    """Its short messages take as long as none at all."""

    RATE = 5e7


def test_a_rate_is_measured_by_a_message_whose_bytes_take_long() -> None:
    """As many bytes as the link carries in that time, whatever a message takes beside them."""
    (timer,) = run_threads(1, lambda comm: Fast(comm, torch.device("cpu")))
    assert timer.bytes_for((0, 0), 0.2) == pytest.approx(0.2 * Fast.RATE, rel=1e-3)
    assert timer.bytes_for((0, 0), 20.0) == MAX_BYTES


class Overlapping(Timer):
    """A message takes 1 s and a tile 0.3; together they take `both` times what they take apart."""

    both = 0.0

    def make_post(self, peers: Any, num_bytes: int) -> Any:
        assert peers == (1 - self.comm.rank,) * 2 and num_bytes > 0
        return object()

    def overlapped(self, post: Any, tile: Any, tiles: int) -> float:
        if post is None or not tiles:
            return 0.3 * tiles if tiles else 1.0
        assert tiles == 3  # as long as the message
        return self.both * (1.0 + 0.3 * tiles)


def occupied(comm: Communicator, both: float, per_host: int) -> float:
    timer = Overlapping(comm, torch.device("cpu"))
    object.__setattr__(timer, "both", both)
    return measure_occupied(timer, per_host, lambda: None)


@pytest.mark.parametrize("per_host", (1, 2))
@pytest.mark.parametrize(("both", "share"), ((1.0, 1.0), (1.2, 1.0), (0.5, 0.05), (0.1, 0.0)))
def test_what_of_a_message_tiles_do_not_hide(both: float, share: float, per_host: int) -> None:
    assert run_threads(2, occupied, both, per_host) == pytest.approx([share] * 2)


def refused(comm: Communicator, hosts: list[str], folder: str) -> str:
    with pytest.raises(ValueError) as caught:
        measured_topology(comm, hosts, torch.device("cpu"), Path(folder))
    return str(caught.value)


def test_hosts_in_turn_are_refused(tmp_path: Path) -> None:
    told = run_processes(4, refused, ["a", "b", "a", "b"], str(tmp_path))
    assert all("ranks 0 and 1 should share host 0" in message for message in told)
