"""`wallfacer bench-links`: the topology of the running job."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from wf_backends.commands import options as o

CACHE = Path(typer.get_app_dir("wallfacer"))


def bench_links(
    out: Annotated[
        Path | None, typer.Option(help="Write the topology here, as JSON; else print it.")
    ] = None,
    cache_dir: o.CacheDir = CACHE,
    fresh: Annotated[bool, typer.Option(help="Measure again, and keep nothing.")] = False,
) -> None:
    """Measure links, NICs, kernel rates and memory of the running job.

    Examples:

        mpirun -n 8 wallfacer bench-links --out topology.json

        torchrun --nproc-per-node 4 -m wf_backends.cli bench-links
    """
    from wf_backends.bench_links import job_hosts, measure, measured
    from wf_backends.comm import make_comm
    from wf_backends.launch import init

    launch = init()
    try:
        start = time.perf_counter()
        comm, hosts = make_comm(), job_hosts(socket.gethostname())
        if fresh:
            topology, known = measure(comm, hosts, launch.device), False
        else:
            topology, known = measured(comm, hosts, launch.device, cache_dir)
        took = time.perf_counter() - start
    finally:
        launch.close()
    if launch.rank:
        return
    text = json.dumps(topology.to_dict(), indent=2)
    if out is None:
        typer.echo(text)
    else:
        out.write_text(text + "\n")
    source = f"from {cache_dir}" if known else f"measured in {took:.1f} s"
    Console(stderr=True).print(f"{topology.name}, {launch.world_size} ranks: {source}")
