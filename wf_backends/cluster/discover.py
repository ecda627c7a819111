"""The topology that "auto" uses: given, named, or measured on the job at first use.

It is the same on every rank of a group. What was measured is kept in a folder: one file for each
list of hosts and kind of device.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from wf_backends.cluster.job import check_job, is_host_by_host
from wf_backends.cluster.measure import measure_topology
from wf_backends.cluster.presets import MEASURE, PRESETS, extended, load, one_host
from wf_backends.cluster.topology import Topology, from_dict
from wf_backends.comm import Communicator, gather_texts


class JobTopology:
    """The topology of the ranks of `comm`, found when it is first asked for.

    Args:
        comm: the ranks of one sequence.
        source: the config's "topology": a preset, a file, "measure" or None.
        given: a topology that is taken as it is, whatever the source.
        folder: where measured topologies are kept.

    Raises:
        ValueError: if the source is a file that does not exist, is no topology, or has fewer ranks.
    """

    def __init__(
        self, comm: Communicator, source: str | None, given: Topology | None, folder: Path
    ) -> None:
        self.comm, self.source, self.folder = comm, source, folder
        named = None if source in (None, MEASURE) else load(str(source), comm.size)
        self.known = given or named
        """The topology, where it is known without asking the other ranks."""
        self._found = given

    def find(self, device: torch.device) -> Topology:
        """The topology. The first call is collective; it may measure.

        Args:
            device: what this rank computes on and sends from.

        Raises:
            ValueError: on every rank, if a file or preset contradicts the hosts of the ranks.
        """
        if self._found is None:
            self._found = self._find(device)
        return self._found

    def _find(self, device: torch.device) -> Topology:
        hosts = job_hosts(self.comm)
        if self.known is not None:
            return check_job(self.known, hosts)
        if self.source is None and device.type == "cpu" and len(set(hosts)) == 1:
            return one_host(self.comm.size)
        if is_host_by_host(hosts):
            return measured_topology(self.comm, hosts, device, self.folder)[0]
        return self._ranks_apart(hosts, device)

    def _ranks_apart(self, hosts: Sequence[str], device: torch.device) -> Topology:
        """Every rank as a host of its own: for hosts with different numbers of ranks, or mixed."""
        if self.comm.rank == 0:
            logging.getLogger(__name__).warning(
                "ranks by host are %s: not the same number side by side on every host. They are "
                "taken as hosts of one rank each, so no plan uses the links inside a host",
                dict(Counter(hosts)),
            )
        apart = [f"{host}, rank {rank}" for rank, host in enumerate(hosts)]
        found = measured_topology(self.comm, apart, device, self.folder)[0]
        shared = 1 if device.type == "cuda" else max(Counter(hosts).values())
        return replace(found, memory_bytes=found.memory_bytes / shared)


def job_hosts(comm: Communicator, host: str | None = None) -> list[str]:
    """The host name of every rank, by rank. Collective.

    Args:
        host: what to call this rank's host; None = by its name.
    """
    return gather_texts(comm, host or socket.gethostname())


def job_topology(comm: Communicator, source: str, device: torch.device, folder: Path) -> Topology:
    """The topology that `source` names, or a measured one if it is empty. Collective.

    Raises:
        ValueError: on every rank, if the topology contradicts the job. A preset gets as many ranks
            as the job has; a file must have as many.
    """
    hosts = job_hosts(comm)
    if not source:
        return measured_topology(comm, hosts, device, folder)[0]
    return check_job(extended(source, comm.size)[0] if source in PRESETS else load(source), hosts)


def measured_topology(
    comm: Communicator,
    hosts: Sequence[str],
    device: torch.device,
    folder: Path,
    fresh: bool = False,
) -> tuple[Topology, bool]:
    """(topology of the ranks of `comm`, whether it comes from the folder). Collective.

    Only rank 0 reads and writes the folder; it sends the others the text.

    Args:
        hosts: the host name of every rank, by rank.
        fresh: measure in any case, and keep nothing.

    Raises:
        ValueError: if hosts have different numbers of ranks or are not numbered one by one.
    """
    key = sha256(repr((list(hosts), device.type)).encode()).hexdigest()[:16]
    path, log = folder / f"topology-{key}.json", logging.getLogger(__name__)
    kept = gather_texts(comm, _read(path) if comm.rank == 0 and not fresh else "")[0]
    if kept:
        if comm.rank == 0:
            log.info("topology of %d ranks: from %s", comm.size, path)
        return from_dict(json.loads(kept)), True
    start = time.perf_counter()
    words = measure_topology(comm, hosts, device).to_dict()
    took = time.perf_counter() - start
    mine = json.dumps(words, indent=2) if comm.rank == 0 else ""  # memory is a rank's own
    text = gather_texts(comm, mine)[0]
    if comm.rank == 0 and not fresh:
        log.warning(_summary(json.loads(text), took) + keep_text(path, text))
    return from_dict(json.loads(text)), False


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Where measured topologies are kept: "wallfacer" under XDG_CACHE_HOME or ~/.cache."""
    try:
        cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no home
        cache = Path(tempfile.gettempdir())
    return cache / "wallfacer"


def _summary(words: Mapping[str, Any], took: float) -> str:
    rates = {name: f"{words[name]['gigabits_per_s']:.3g} Gbit/s" for name in ("inside", "between")}
    links = [f"{rates['inside']} inside"] if words["ranks_per_host"] > 1 else []
    if words["hosts"] > 1:
        links.append(f"{rates['between']} for each of {words['nics_per_host']} NICs of a host")
    hosts = f"{words['hosts']} hosts x {words['ranks_per_host']} ranks"
    return f"measured {hosts} in {took:.1f} s: {', '.join(links) or 'no links'}; "


def _read(path: Path) -> str:
    """The text of a topology that was kept; empty if there is none that can be read."""
    try:
        text = path.read_text()
        from_dict(json.loads(text))
    except (OSError, ValueError):
        return ""
    return text


def keep_text(path: Path, text: str) -> str:
    """Write the file, whole or not at all. Returns what to log about it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(text + "\n")
        part.replace(path)
    except OSError as error:
        return f"not kept ({error})"
    return f"kept in {path}, delete it to measure again"
