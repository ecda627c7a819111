"""What the hosts, links and kernels are."""

from wf_backends.cluster.checkup import Finding, check_up
from wf_backends.cluster.discover import (
    JobTopology,
    cache_folder,
    job_hosts,
    job_topology,
    measured_topology,
    save_text,
)
from wf_backends.cluster.presets import PRESETS, check_source, load, load_extended, one_host
from wf_backends.cluster.timer import Timer
from wf_backends.cluster.topology import KERNEL_NAMES, KernelRate, Link, Topology

__all__ = [
    "KERNEL_NAMES",
    "PRESETS",
    "Finding",
    "JobTopology",
    "KernelRate",
    "Link",
    "Timer",
    "Topology",
    "cache_folder",
    "check_up",
    "check_source",
    "job_hosts",
    "job_topology",
    "load",
    "load_extended",
    "measured_topology",
    "one_host",
    "save_text",
]
