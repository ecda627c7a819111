"""Whether the hosts of a launched job are those of a topology.

Pure: standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence

from wf_backends.cluster.topology import Topology

REMEDY = (
    "Name another or correct its file; or measure one: wallfacer bench-links --out topology.json, "
    'or "topology": "measure" in a config'
)


def is_host_by_host(hosts: Sequence[str]) -> bool:
    """Whether all hosts have the same number of ranks, and the ranks of a host are neighbours.

    Args:
        hosts: the host name of every rank, by rank.
    """
    per_host, remainder = divmod(len(hosts), len(set(hosts)))
    if remainder:
        return False
    return all(host == hosts[rank // per_host * per_host] for rank, host in enumerate(hosts))


def check_job(topology: Topology, hosts: Sequence[str], remedy: str = REMEDY) -> Topology:
    """The topology itself, if it describes the launched job.

    Args:
        hosts: the host name of every rank, by rank.
        remedy: what to do if it does not, for the error.

    Raises:
        ValueError: if the job has other ranks or hosts, or is not numbered host by host.
    """
    wrong = f"topology {topology.name!r} contradicts the job"
    if len(hosts) != topology.size:
        raise ValueError(
            f"{wrong}: it has {topology.hosts} hosts x {topology.ranks_per_host} ranks = "
            f"{topology.size}, the job {len(hosts)} ranks. {remedy}"
        )
    if len(set(hosts)) != topology.hosts:
        raise ValueError(
            f"{wrong}: it has {topology.hosts} hosts, the job {len(set(hosts))}: "
            f"{sorted(set(hosts))}. {remedy}"
        )
    for rank, host in enumerate(hosts):
        first = topology.host(rank) * topology.ranks_per_host
        if host != hosts[first]:
            raise ValueError(
                f"{wrong}: ranks {first} and {rank} should share host {topology.host(rank)}, but "
                f"run on {hosts[first]!r} and {host!r}. {remedy}"
            )
    return topology
