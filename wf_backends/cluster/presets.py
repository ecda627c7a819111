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
from pathlib import Path
from types import MappingProxyType
from typing import Any

from wf_backends._validation import nearest
from wf_backends.cluster.topology import KernelRate, Link, Topology, from_dict


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, of which json itself would take the last of two values."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} is given twice: {found[key]!r} and {value!r}")
        found[key] = value
    return found


MEASURE = "measure"  # in place of a name: the topology is measured in the job

READERS = MappingProxyType(
    {".json": partial(json.loads, object_pairs_hook=_once), ".toml": tomllib.loads}
)

# Nominal figures of the makers; kernel rates of the FlashAttention-2 paper (arXiv 2307.08691):
# 73 % and 63 % of an A100's 312 TFLOP/s, 335 TFLOP/s on an H100. one-host: gloo and one CPU core
# a rank, in round numbers. Measure your own cluster.
_H100 = KernelRate(335e12, 335e12, 10e-6)
_A100 = KernelRate(228e12, 197e12, 10e-6)
_CPU = KernelRate(2e10, 4e10, 50e-6)

PRESETS: Mapping[str, Topology] = MappingProxyType(
    {
        "h100-8x400g": Topology(
            "h100-8x400g",
            hosts=8,
            ranks_per_host=8,
            nics_per_host=8,
            inside=Link(5e-6, 450e9),
            between=Link(10e-6, 50e9),
            kernels=(("flash", _H100),),
            memory_bytes=80 * 2**30,
        ),
        "a100-4x-100gbe": Topology(
            "a100-4x-100gbe",
            hosts=8,
            ranks_per_host=4,
            nics_per_host=1,
            inside=Link(5e-6, 300e9),
            between=Link(30e-6, 12.5e9),
            kernels=(("flash", _A100),),
            memory_bytes=40 * 2**30,
        ),
        "one-host": Topology(
            "one-host",
            hosts=1,
            ranks_per_host=8,
            nics_per_host=1,
            inside=Link(100e-6, 1.3e9),
            between=Link(200e-6, 1.25e9),
            kernels=(("sdpa", _CPU),),
            memory_bytes=8 * 2**30,
        ),
    }
)


def load(source: str, size: int | None = None) -> Topology:
    """The topology of a preset's name or of a .json or .toml file.

    Args:
        size: ranks that are meant; a preset has as many, and a file at least as many.

    Raises:
        ValueError: if there is no such preset or file, naming the key that is wrong in it, or if
            it has not so many ranks.
    """
    if source in PRESETS:
        preset = PRESETS[source]
        if size is None:
            return preset
        return one_host(size) if preset.hosts == 1 else preset.with_ranks(size)
    path = Path(source)
    if path.suffix not in READERS or not _is_file(path):
        raise ValueError(
            f"topology must be one of {list(PRESETS)}, or a {' or '.join(READERS)} file that "
            f"exists; got {source!r}{nearest(source, PRESETS)}"
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


def _is_file(path: Path) -> bool:
    """Whether there is such a file; a name longer than names may be is none of one."""
    try:
        return path.is_file()
    except OSError:
        return False


def one_host(size: int) -> Topology:
    """The one-host preset for `size` ranks, of whose memory nothing is known."""
    return replace(PRESETS["one-host"], ranks_per_host=size, memory_bytes=inf)
