"""The topology of a real job: measured within seconds, equal on all ranks, kept per host list."""

from __future__ import annotations

import threading
import time
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers import run_processes, run_threads
from wf_backends.cluster import timer
from wf_backends.cluster.discover import measured_topology
from wf_backends.cluster.measure_links import measure_occupied
from wf_backends.cluster.timer import MAX_BYTES, Timer
from wf_backends.comm import Communicator

pytestmark = pytest.mark.processes


def measure_twice(
    comm: Communicator, hosts: list[str], folder: str
) -> tuple[Any, Any, float, float]:
    torch.set_num_threads(1)
    cpu_start, wall_start = time.process_time(), time.perf_counter()
    first = measured_topology(comm, hosts, torch.device("cpu"), Path(folder))
    cpu_s = time.process_time() - cpu_start  # other tests may share the cores with this one
    wall_s = time.perf_counter() - wall_start
    assert not comm.sent  # the bytes of a measurement are not counted as the job's
    return first, measured_topology(comm, hosts, torch.device("cpu"), Path(folder)), cpu_s, wall_s


@pytest.mark.parametrize(("hosts", "per_host"), [(["a", "b"], 1), (["a", "a", "b", "b"], 2)])
def test_a_job_is_measured_once(hosts: list[str], per_host: int, tmp_path: Path) -> None:
    """The second time, the topology is read from the one file that the first has written."""
    results = run_processes(len(hosts), measure_twice, hosts, str(tmp_path))
    (topology, _), _, cpu_s, wall_s = results[0]
    for first, second, *_ in results:
        assert first == (topology, False) and second == (topology, True)
    assert cpu_s < 10
    assert (topology.hosts, topology.ranks_per_host) == (len(set(hosts)), per_host)
    assert 0 < topology.inside.latency_s < wall_s / 10 and topology.inside.bytes_per_s > 1e6
    assert 0 <= topology.occupied <= 1 and topology.rate().diagonal_keys >= 0
    assert (0 < topology.exchange_s < wall_s / 10) == (per_host > 1)
    assert topology.kernels[0][0] == "sdpa" and topology.rate().forward_flops_per_s > 1e8
    assert len(list(tmp_path.iterdir())) == 1


class Clock(threading.local):
    """A clock for each rank, which is a thread."""

    now = 0.0


def repeats_of_a_timer(comm: Communicator, no_repeats_after_s: float, clock: Clock) -> int:
    """How often work is repeated that takes 0.4 s on rank 2 and no time on the other ranks."""

    def work() -> None:
        clock.now += 0.4 * (comm.rank == 2)

    return len(Timer(comm, torch.device("cpu"), no_repeats_after_s, 0.0).times(work, repeats=4))


@pytest.mark.parametrize(("no_repeats_after_s", "repeats"), ((10.0, 4), (0.1, 1), (0.7, 2)))
def test_all_ranks_stop_repeating_when_one_is_late(
    no_repeats_after_s: float, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(timer, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    assert run_threads(3, repeats_of_a_timer, no_repeats_after_s, clock) == [repeats] * 3


@pytest.mark.parametrize("late", (False, True))
@pytest.mark.parametrize(("series_s", "rel"), ((0.2, 0.06), (1.0, 0.015)))
def test_the_time_of_a_run_is_right_if_ranks_start_apart(
    series_s: float, rel: float, late: bool
) -> None:
    """10 ms of a series are over before the last rank starts: the error is smaller in a long one.

    `late`: the time for repeats is used up.
    """
    runs = list[None]()

    class LateStart(Timer):
        """A millisecond for each run, minus the 10 ms."""

        def times(self, work: Any, repeats: int, max_total_s: float = inf) -> list[float]:
            runs.clear()
            work()
            return [max(0.0, 1e-3 * len(runs) - 0.01)] * (1 if late else repeats)

    def seconds_per_run(comm: Communicator) -> float:
        return LateStart(comm, torch.device("cpu")).per_run(lambda: runs.append(None), series_s)

    assert run_threads(1, seconds_per_run) == [pytest.approx(1e-3, rel=rel)]


class Steady(Timer):
    """A link with 10 ms of latency and a constant rate."""

    RATE = 1e6
    BURST = 0
    """The first bytes of a message, which take no time."""

    def exchange(self, peers: Any, num_bytes: int, repeats: int, rounds: int = 1) -> list[float]:
        shaped = max(0, num_bytes - self.BURST)
        return [rounds * (0.01 + shaped / self.RATE)] * repeats


class Bursting(Steady):
    BURST = 1 << 14


class Hiccup(Steady):
    """Messages of 4 to 64 KiB take 30 ms longer."""

    def exchange(self, peers: Any, num_bytes: int, repeats: int, rounds: int = 1) -> list[float]:
        times = super().exchange(peers, num_bytes, repeats, rounds)
        return [seconds + 0.03 * (1 << 12 < num_bytes < 1 << 16) for seconds in times]


@pytest.mark.parametrize("link", (Steady, Bursting, Hiccup))
def test_latency_bursts_and_hiccups_do_not_change_a_measured_rate(link: type[Steady]) -> None:
    (timer,) = run_threads(1, lambda comm: link(comm, torch.device("cpu")))
    latency = timer.latency((0, 0))
    assert latency == pytest.approx(0.01, rel=1e-3)
    assert timer.rate((0, 0), latency) == pytest.approx(Steady.RATE, rel=1e-4)


class Fast(Steady):
    """The bytes of a short message take no time beside its latency."""

    RATE = 5e7


def test_bytes_for_a_time_are_those_that_the_link_carries_in_it() -> None:
    """The latency of a message does not count."""
    (timer,) = run_threads(1, lambda comm: Fast(comm, torch.device("cpu")))
    assert timer.bytes_for((0, 0), 0.2) == pytest.approx(0.2 * Fast.RATE, rel=1e-3)
    assert timer.bytes_for((0, 0), 20.0) == MAX_BYTES


class Overlapping(Timer):
    """A message takes 1 s, a tile 0.3 s; both at once take `overlap` x the sum of their times."""

    overlap = 0.0

    def make_post(self, peers: Any, num_bytes: int) -> Any:
        assert peers == (1 - self.comm.rank,) * 2 and num_bytes > 0
        return object()

    def overlapped(self, post: Any, tile: Any, tiles: int) -> float:
        if post is None or not tiles:
            return 0.3 * tiles if tiles else 1.0
        assert tiles == 3  # as long as the message
        return self.overlap * (1.0 + 0.3 * tiles)


def occupied_share(comm: Communicator, overlap: float, per_host: int) -> float:
    timer = Overlapping(comm, torch.device("cpu"))
    object.__setattr__(timer, "overlap", overlap)
    return measure_occupied(timer, per_host, lambda: None)


@pytest.mark.parametrize("per_host", (1, 2))
@pytest.mark.parametrize(("overlap", "share"), ((1.0, 1.0), (1.2, 1.0), (0.5, 0.05), (0.1, 0.0)))
def test_the_occupied_share_of_a_message_is_what_tiles_do_not_hide(
    overlap: float, share: float, per_host: int
) -> None:
    assert run_threads(2, occupied_share, overlap, per_host) == pytest.approx([share] * 2)


def error_of_measuring(comm: Communicator, hosts: list[str], folder: str) -> str:
    with pytest.raises(ValueError) as caught:
        measured_topology(comm, hosts, torch.device("cpu"), Path(folder))
    return str(caught.value)


def test_hosts_whose_ranks_alternate_are_refused(tmp_path: Path) -> None:
    errors = run_processes(4, error_of_measuring, ["a", "b", "a", "b"], str(tmp_path))
    assert all("ranks 0 and 1 should share host 0" in error for error in errors)
    assert all("Start as many ranks on every host" in error for error in errors)
    assert not any("bench-links" in error for error in errors)  # that is what was run
