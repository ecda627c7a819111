"""The topology that "auto" uses: given, named, or measured on the job at first use.

It is the same on every rank of a group. Measured topologies are kept in a folder: one file for each
list of hosts and device type.
"""

from __future__ import annotations

import json
import logging
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import torch

from wf_backends.checkpoints import write_whole
from wf_backends.cluster.measure import measure_topology
from wf_backends.cluster.presets import MEASURE, PRESETS, load, load_extended, one_host
from wf_backends.cluster.topology import Topology, check_job, from_dict, is_host_by_host
from wf_backends.comm import Communicator, gather_texts


class JobTopology:
    """The topology of the ranks of `comm`, found at the first call of `find`.

    Args:
        comm: the ranks of one sequence.
        source: the config's "topology": a preset, a file, "measure" or None.
        given: a topology that is used instead of the source.
        folder: where measured topologies are kept.

    Raises:
        ValueError: if the source is a file that does not exist, is no topology or has too few
            ranks.
    """

    def __init__(
        self, comm: Communicator, source: str | None, given: Topology | None, folder: Path
    ) -> None:
        self.comm, self.source, self.folder = comm, source, folder
        named = None if source in (None, MEASURE) else load(str(source), comm.size)
        self.known = given or named
        """The topology, if it is known without communication."""
        self._topology = given

    def find(self, device: torch.device) -> Topology:
        """The topology. The first call is collective; it may measure.

        Args:
            device: what this rank computes on and sends from.

        Raises:
            ValueError: on every rank, if a file or preset contradicts the hosts of the ranks.
        """
        if self._topology is None:
            self._topology = self._find(device)
        return self._topology

    def _find(self, device: torch.device) -> Topology:
        hosts = job_hosts(self.comm)
        if self.known is not None:
            return check_job(self.known, hosts)
        if self.source is None and device.type == "cpu" and len(set(hosts)) == 1:
            return one_host(self.comm.size)
        if is_host_by_host(hosts):
            return measured_topology(self.comm, hosts, device, self.folder)[0]
        return self._one_rank_hosts(hosts, device)

    def _one_rank_hosts(self, hosts: Sequence[str], device: torch.device) -> Topology:
        """Every rank as a host of its own, where ranks are not numbered host by host, evenly."""
        if self.comm.rank == 0:
            logging.getLogger(__name__).warning(
                "ranks by host are %s: not the same number side by side on every host. They are "
                "taken as hosts of one rank each, so no plan uses the links inside a host",
                dict(Counter(hosts)),
            )
        names = [f"{host}, rank {rank}" for rank, host in enumerate(hosts)]
        topology = measured_topology(self.comm, names, device, self.folder)[0]
        sharing_memory = 1 if device.type == "cuda" else max(Counter(hosts).values())
        return replace(topology, memory_bytes=topology.memory_bytes / sharing_memory)


def job_hosts(comm: Communicator) -> list[str]:
    """The host name of every rank, by rank. Collective."""
    return gather_texts(comm, socket.gethostname())


def job_topology(comm: Communicator, source: str, device: torch.device, folder: Path) -> Topology:
    """The topology that `source` names, or a measured one: "measure" or empty. Collective.

    Raises:
        ValueError: on every rank, if the topology contradicts the job. A preset gets as many ranks
            as the job has; a file must have as many.
    """
    hosts = job_hosts(comm)
    if source in ("", MEASURE):
        return measured_topology(comm, hosts, device, folder)[0]
    topology = load_extended(source, comm.size)[0] if source in PRESETS else load(source)
    return check_job(topology, hosts)


def measured_topology(
    comm: Communicator,
    hosts: Sequence[str],
    device: torch.device,
    folder: Path,
    fresh: bool = False,
) -> tuple[Topology, bool]:
    """(topology of the ranks of `comm`, whether it comes from the folder). Collective.

    Only rank 0 reads and writes the folder; it sends the text to the other ranks.

    Args:
        hosts: the host name of every rank, by rank.
        fresh: measure in any case, and keep nothing.
    """
    key = sha256(repr((list(hosts), device.type)).encode()).hexdigest()[:16]
    path, log = folder / f"topology-{key}.json", logging.getLogger(__name__)
    cached = gather_texts(comm, _read_cached(path) if comm.rank == 0 and not fresh else "")[0]
    if cached:
        if comm.rank == 0:
            log.info("topology of %d ranks: from %s", comm.size, path)
        return from_dict(json.loads(cached)), True
    start = time.perf_counter()
    measured = measure_topology(comm, hosts, device)
    seconds = time.perf_counter() - start
    # each rank has measured its own memory: all use the figure of rank 0
    text = gather_texts(comm, json.dumps(measured.to_dict(), indent=2) if comm.rank == 0 else "")[0]
    if comm.rank == 0 and not fresh:
        log.warning(_summary(measured, seconds) + save_text(path, text))
    return from_dict(json.loads(text)), False


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Where measured topologies are kept: "wallfacer" under XDG_CACHE_HOME or ~/.cache."""
    try:
        cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no home
        cache = Path(tempfile.gettempdir())
    return cache / "wallfacer"


def _summary(topology: Topology, seconds: float) -> str:
    inside, between = (
        f"{link.bytes_per_s * 8e-9:.3g} Gbit/s" for link in (topology.inside, topology.between)
    )
    links = [f"{inside} inside"] if topology.ranks_per_host > 1 else []
    if topology.hosts > 1:
        links.append(f"{between} for each of {topology.nics_per_host} NICs of a host")
    hosts = f"{topology.hosts} hosts x {topology.ranks_per_host} ranks"
    return f"measured {hosts} in {seconds:.1f} s: {', '.join(links) or 'no links'}; "


def _read_cached(path: Path) -> str:
    """The text of a kept topology; empty if no readable one is kept."""
    try:
        text = path.read_text()
        from_dict(json.loads(text))
    except (OSError, ValueError):
        return ""
    return text


def save_text(path: Path, text: str) -> str:
    """Write the file, whole or not at all. Returns what to log about it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text + "\n")
    except OSError as error:
        return f"not kept ({error})"
    return f"kept in {path}, delete it to measure again"
