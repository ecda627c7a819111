"""The topology of the running job, measured within ten seconds: links, NICs, kernels, memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch

from wf_backends.cluster.measure_kernels import HEAD_DIM, KernelTimer
from wf_backends.cluster.measure_links import (
    measure_between,
    measure_inside,
    measure_occupied,
    open_connections,
)
from wf_backends.cluster.presets import PRESETS
from wf_backends.cluster.timer import Timer
from wf_backends.cluster.topology import Topology, check_job
from wf_backends.comm import Communicator
from wf_backends.runtime import Messages, gather_rows, make_head_exchange
from wf_backends.schedule import make_layout

COLLECTIVE_REPEATS = 7  # of which the median counts
NO_REPEATS_AFTER_S = 6.0  # of measuring: all must be done in ten seconds


def measure_topology(comm: Communicator, hosts: Sequence[str], device: torch.device) -> Topology:
    """The topology of a job. Collective. The same on all ranks, except for memory_bytes.

    Args:
        comm: all ranks of the job.
        hosts: the host name of every rank, by rank.
        device: what this rank computes on and sends from.

    Raises:
        ValueError: if hosts have different numbers of ranks or are not numbered one by one.
    """
    num_hosts = len(set(hosts))
    per_host = len(hosts) // num_hosts
    name = f"measured on {hosts[0]}" + (f" and {num_hosts - 1} more" if num_hosts > 1 else "")
    nominal = replace(
        PRESETS["one-host"], name=name, hosts=num_hosts, ranks_per_host=per_host, nics_per_host=1
    )
    check_job(nominal, hosts, "Start as many ranks on every host, numbered host by host")
    open_connections(Timer(comm, device), per_host)
    timer, kernel = Timer(comm, device, NO_REPEATS_AFTER_S), KernelTimer(device)
    tile, _ = kernel.tiles(kernel.sizes.overlapped)
    inside = measure_inside(timer, per_host) if per_host > 1 else nominal.inside
    between, nics = measure_between(timer, per_host) if num_hosts > 1 else (nominal.between, 1)
    return replace(
        nominal,
        inside=inside,
        between=between,
        nics_per_host=nics,
        exchange_s=_exchange_s(timer, per_host) if per_host > 1 else 0.0,
        kernels=((kernel.name, kernel.rate(timer.per_run)),),
        memory_bytes=_memory_bytes(device, per_host),
        occupied=measure_occupied(timer, per_host, tile),
    )


def _exchange_s(timer: Timer, per_host: int) -> float:
    """Seconds of an all-to-all of heads for a few tokens inside a host, on all hosts at once."""
    comm = timer.comm
    first = comm.rank // per_host * per_host
    host = comm.view(range(first, first + per_host))
    exchange = make_head_exchange(make_layout("contiguous", per_host, per_host), per_host, per_host)
    x = torch.zeros(1, 1, per_host, HEAD_DIM, device=timer.device)

    def exchange_qkv() -> None:
        messages = Messages(host, "bench")
        for _ in "qkv":
            gather_rows(messages, exchange, x)
        messages.post().wait()

    return median(timer.times(exchange_qkv, COLLECTIVE_REPEATS))


def _memory_bytes(device: torch.device, per_host: int) -> float:
    """The memory of one rank: its GPU's, or its share of the host's."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / per_host
