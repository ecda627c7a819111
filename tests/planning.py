"""What tests of the planner share: a small model, masks, and made-up clusters."""

from __future__ import annotations

from typing import Any

from wf_backends.cluster.topology import KernelRate, Link, Topology
from wf_backends.lowering.message_bytes import Shape
from wf_backends.schedule.mask import CAUSAL, Band, Mask

SHAPE = Shape(batch=1, heads=8, kv_heads=2, head_dim=16, itemsize=2)
MASKS = (Mask(), Mask(CAUSAL), Mask(Band(30, 0)))
BYTES = 100
"""A message of so many bytes takes one second through a NIC of `plain_cluster`."""


def cluster(hosts: int, ranks: int, nics: int = 1, gbit: float = 1.0) -> Topology:
    """`ranks` per host, `nics` per host, `gbit` of each NIC."""
    rates = (("sdpa", KernelRate(2e10, 4e10, 1e-5)),)
    inside, between = Link(1e-6, 1e10), Link(1e-4, gbit * 1e9 / 8)
    return Topology("lab", hosts, ranks, nics, inside, between, rates, 1e12)


def lab_cluster(hosts: int, ranks: int, nics: int, call_s: float = 0.0) -> Topology:
    """25 Mbit/s and 1 ms between hosts, as in the laboratory of benchmarks/lab.py."""
    rates = (("sdpa", KernelRate(2e10, 4e10, call_s)),)
    inside, between = Link(1e-5, 1e10), Link(1e-3, 25e6 / 8)
    return Topology("lab", hosts, ranks, nics, inside, between, rates, 1e12)


def plain_cluster(
    hosts: int, ranks: int, nics: int, latency_s: float = 0.0, **more: Any
) -> Topology:
    """No latency and round rates, so that times can be computed by hand.

    A rank sends `4 * BYTES` a second inside a host; a NIC sends `BYTES` a second.
    """
    rates = (("sdpa", KernelRate(1e9, 1e9, 0.0)),)
    inside, between = Link(0.0, 4 * BYTES), Link(latency_s, BYTES)
    return Topology("four ranks", hosts, ranks, nics, inside, between, rates, 1e9, **more)
