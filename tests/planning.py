"""What tests of the planner share: a small model, masks, and a made-up cluster."""

from __future__ import annotations

from wf_backends.cluster.topology import KernelRate, Link, Topology
from wf_backends.lowering.message_bytes import Shape
from wf_backends.schedule.mask import CAUSAL, Band, Mask

SHAPE = Shape(batch=1, heads=8, kv_heads=2, head_dim=16, itemsize=2)
MASKS = (Mask(), Mask(CAUSAL), Mask(Band(30, 0)))


def cluster(hosts: int, ranks: int, nics: int = 1, gbit: float = 1.0) -> Topology:
    rates = (("sdpa", KernelRate(2e10, 4e10, 1e-5)),)
    inside, between = Link(1e-6, 1e10), Link(1e-4, gbit * 1e9 / 8)
    return Topology("lab", hosts, ranks, nics, inside, between, rates, 1e12)
