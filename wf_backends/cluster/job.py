"""Whether the hosts of a launched job are those of a topology.

Pure: standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence

from wf_backends.cluster.topology import Topology


def is_host_by_host(hosts: Sequence[str]) -> bool:
    """Whether every host has as many ranks, numbered side by side.

    Args:
        hosts: the host name of every rank, by rank.
    """
    each, uneven = divmod(len(hosts), len(set(hosts)))
    return not uneven and all(host == hosts[rank // each * each] for rank, host in enumerate(hosts))


def check_job(topology: Topology, hosts: Sequence[str]) -> Topology:
    """The topology itself, once it is known to describe the launched job.

    Args:
        hosts: the host name of every rank, by rank.

    Raises:
        ValueError: if the job has other ranks, other hosts, or is not numbered host by host.
    """
    wrong = f"topology {topology.name!r} contradicts the job"
    way_out = (
        "Name another or correct its file; or measure one: wallfacer bench-links --out "
        'topology.json, or "topology": "measure" in a config'
    )
    if len(hosts) != topology.size:
        raise ValueError(
            f"{wrong}: it has {topology.hosts} hosts x {topology.ranks_per_host} ranks = "
            f"{topology.size}, the job {len(hosts)} ranks. {way_out}"
        )
    if len(set(hosts)) != topology.hosts:
        raise ValueError(
            f"{wrong}: it has {topology.hosts} hosts, the job {len(set(hosts))}: "
            f"{sorted(set(hosts))}. {way_out}"
        )
    for rank, host in enumerate(hosts):
        first = topology.host(rank) * topology.ranks_per_host
        if host != hosts[first]:
            raise ValueError(
                f"{wrong}: ranks {first} and {rank} should share host {topology.host(rank)}, but "
                f"run on {hosts[first]!r} and {host!r}. {way_out}"
            )
    return topology
