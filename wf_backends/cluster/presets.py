"""Topologies by name, and from files.

Pure: standard library only.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import inf
from os.path import isfile
from pathlib import Path
from types import MappingProxyType

from wf_backends._validation import nearest, without_duplicates
from wf_backends.cluster.topology import KernelRate, Link, Topology, from_dict

MEASURE = "measure"  # instead of a name: the job measures its topology
READERS = MappingProxyType(  # by suffix
    {".json": partial(json.loads, object_pairs_hook=without_duplicates), ".toml": tomllib.loads}
)

# Nominal figures of the makers. Kernel rates: flash-attn 2's of its paper (arXiv 2307.08691), 73 %
# and 63 % of an A100's 312 TFLOP/s, 335 TFLOP/s on an H100; torch's on an H100 (cuDNN) as measured
# in benchmarks/results/one_rank.md, "one call". "auto" selects the kernel that is listed first.
# one-host: gloo and one CPU core a rank, which moves messages or computes, in round numbers.
# Measure your own cluster.
_H100 = (
    ("sdpa", KernelRate(598e12, 513e12, 10e-6)),
    ("flash", KernelRate(335e12, 335e12, 10e-6)),
)
_A100 = (("flash", KernelRate(228e12, 197e12, 10e-6)),)
_LOOPBACK, _TEN_GIGABIT = Link(100e-6, 1.3e9), Link(200e-6, 1.25e9)
_CPU = (("sdpa", KernelRate(2e10, 4e10, 50e-6)),)

# name, hosts, ranks of a host, NICs of a host, link inside, link between; kernels, memory of a rank
_TOPOLOGIES = (
    Topology("h100-8x400g", 8, 8, 8, Link(5e-6, 450e9), Link(10e-6, 50e9), _H100, 80 * 2**30),
    Topology("a100-4x-100gbe", 8, 4, 1, Link(5e-6, 300e9), Link(30e-6, 12.5e9), _A100, 40 * 2**30),
    Topology("one-host", 1, 8, 1, _LOOPBACK, _TEN_GIGABIT, _CPU, 8 * 2**30, occupied=1.0),
)
PRESETS: Mapping[str, Topology] = MappingProxyType({t.name: t for t in _TOPOLOGIES})


def check_source(source: object) -> None:
    """Refuse what cannot name a topology. Whether a file exists is checked by `load`.

    Raises:
        ValueError: if it is no preset, no .json or .toml file, and not "measure".
    """
    known = (*PRESETS, MEASURE)
    if source not in known and not str(source).endswith(tuple(READERS)):
        raise ValueError(
            f"topology must be one of {list(known)}, or a {' or '.join(READERS)} file, got "
            f"{source!r}{nearest(source, known)}"
        )


def load(source: str, size: int | None = None) -> Topology:
    """The topology of a preset's name, or of a .json or .toml file.

    Args:
        size: the number of ranks. A preset of several hosts gets as many hosts as they fill; a file
            must have at least as many ranks. None = the ranks of the preset or file.

    Raises:
        ValueError: if there is no such preset or file, or the file has a wrong key or too few
            ranks.
    """
    if source in PRESETS:
        preset = PRESETS[source]
        if size is None:
            return preset
        return one_host(size) if preset.hosts == 1 else preset.with_ranks(size)
    path = Path(source)
    if path.suffix not in READERS or not isfile(path):
        hint = nearest(source, PRESETS)
        if source == MEASURE:
            hint = ", which takes a job: mpirun -n 8 wallfacer bench-links --out topology.json"
        raise ValueError(
            f"topology must be one of {list(PRESETS)}, or a {' or '.join(READERS)} file that "
            f"exists; got {source!r}{hint}"
        )
    try:
        topology = from_dict(READERS[path.suffix](path.read_text()))
        if size is not None and size > topology.size:
            raise ValueError(f"it has {topology.size} ranks, but {size} share a sequence")
        return topology if size is None else topology.with_ranks(size)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except RecursionError:
        raise ValueError(f"{path}: it is nested too deep for a topology") from None


def load_extended(source: str, ranks: int) -> tuple[Topology, int]:
    """(a topology with as many hosts as `ranks` ranks fill, how many of them its file lacks).

    Args:
        source: a preset's name, which may have any number of hosts, or a .json or .toml file. The
            preset of one host stays one host, of `ranks` ranks.
        ranks: 0 = the ranks of the preset or file.

    Raises:
        ValueError: as `load` does, or if the ranks do not fill hosts.
    """
    topology = load(source)
    if not ranks:
        return topology, 0
    if source in PRESETS and topology.hosts == 1:
        return replace(topology, ranks_per_host=ranks), 0
    extended = topology.with_ranks(ranks)
    return extended, 0 if source in PRESETS else max(0, extended.hosts - topology.hosts)


def one_host(size: int) -> Topology:
    """The one-host preset for `size` ranks; its memory is unknown, and so unlimited."""
    return replace(PRESETS["one-host"], ranks_per_host=size, memory_bytes=inf)
