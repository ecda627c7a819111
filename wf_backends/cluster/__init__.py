"""What the hosts, links and kernels are; joining a job."""

from wf_backends.cluster.discover import Cluster, cache_folder, job_hosts, measured
from wf_backends.cluster.job import check_job
from wf_backends.cluster.launch import Launch, init, settle_at_exit
from wf_backends.cluster.measure_links import measure
from wf_backends.cluster.presets import MEASURE, PRESETS, READERS, load, one_host
from wf_backends.cluster.timer import Meter
from wf_backends.cluster.topology import KERNEL_NAMES, KernelRate, Link, Topology, from_dict

__all__ = [
    "Cluster",
    "KERNEL_NAMES",
    "KernelRate",
    "Launch",
    "Link",
    "MEASURE",
    "Meter",
    "PRESETS",
    "READERS",
    "Topology",
    "cache_folder",
    "check_job",
    "from_dict",
    "init",
    "job_hosts",
    "load",
    "measure",
    "measured",
    "one_host",
    "settle_at_exit",
]
