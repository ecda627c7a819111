"""`wallfacer bench-links`: the topology of the running job."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from wf_backends import launch
from wf_backends.cli import options as o
from wf_backends.cluster import cache_folder, job_hosts, measured_topology
from wf_backends.comm import make_comm


def bench_links(
    out: Annotated[
        Path | None, typer.Option(help="Write the topology here, as JSON; else print it.")
    ] = None,
    cache_dir: o.CacheDir = None,
    fresh: o.Fresh = False,
) -> None:
    """Measure links, NICs, kernel rates and memory of the running job.

    Examples:

        mpirun -n 8 wallfacer bench-links --out topology.json

        torchrun --nproc-per-node 4 -m wf_backends.cli bench-links
    """
    o.check_file("--out", out)
    launched, folder = launch.init(), cache_dir or cache_folder(os.environ)
    try:
        start = time.perf_counter()
        comm = make_comm()
        hosts = job_hosts(comm)
        topology, known = measured_topology(comm, hosts, launched.device, folder, fresh)
        took = time.perf_counter() - start
    finally:
        launched.close()
    if launched.rank:
        return
    text = json.dumps(topology.to_dict(), indent=2)
    if out is None:
        typer.echo(text)
    else:
        out.write_text(text + "\n")
    source = f"from {folder}" if known else f"measured in {took:.1f} s"
    told = f"{topology.name}, {launched.world_size} ranks: {source}"
    Console(stderr=True).print(escape(told))
