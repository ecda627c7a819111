"""`wallfacer bench-links`: measures the topology of the running job."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Annotated

from typer import Option

from wf_backends import launch
from wf_backends.checkpoints import write_whole
from wf_backends.cli import options as o
from wf_backends.cluster import job_hosts, measured_topology
from wf_backends.comm import make_comm


def bench_links(
    out: Annotated[Path | None, Option(help="Write JSON to this file; else print it.")] = None,
    cache_dir: o.CacheDir = None,
    fresh: o.Fresh = False,
) -> None:
    """Measure links, NICs, kernel rates and memory of the running job.

    Examples:

        mpirun -n 8 wallfacer bench-links --out topology.json

        torchrun --nproc-per-node 4 -m wf_backends.cli bench-links
    """
    o.check_file("--out", out, (".json",))
    folder = o.cache_folder_of(cache_dir)
    with closing(launch.init()) as job:
        start = time.perf_counter()
        comm = make_comm()
        topology, is_cached = measured_topology(comm, job_hosts(comm), job.device, folder, fresh)
        seconds = time.perf_counter() - start
    if job.rank:
        return
    text = json.dumps(topology.to_dict(), indent=2) + "\n"
    sys.stdout.write(text) if out is None else write_whole(out, text)
    source = f"from {folder}" if is_cached else f"measured in {seconds:.1f} s"
    print(f"{topology.name}, {job.world_size} ranks: {source}", file=sys.stderr)
