"""How a job ends when one rank makes a fault: seconds to the last rank's end, and what is said.

Starts jobs of 4 ranks under mpirun, in which rank 1 makes a fault in a layer of its third step
(fault_rank.py), over gloo, over MPI as transport and under DeepSpeed.

    python benchmarks/faults.py > benchmarks/results/faults.md
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from fault_rank import CALLS, ENDINGS, SKIPS, TENSORS
from measure import cores_and_load, cpu_name

RANKS, TIMEOUT_S, GIVE_UP_S = 4, 15, 120
KINDS = (*ENDINGS, *SKIPS, *CALLS, *TENSORS)
TRANSPORTS = ("gloo", "mpi", "deepspeed")
MPIRUN = ["mpirun", "--allow-run-as-root", "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]
LONGEST = 230  # characters of a message
ERROR = re.compile(r"\[rank[0-9]+\]: [\w.]*Error: ((?:global )?rank .*|the ranks do not agree.*)")
LIBRARY = re.compile(r"\[/\S+\] |This is typically caused.*?GLHF! \S+ ?| \[[\d.:]+\]:\d+")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", default=",".join(KINDS), help="separated by commas")
    parser.add_argument("--transports", default=",".join(TRANSPORTS))
    args = parser.parse_args()
    print("# Faults of one rank\n")
    print("    python benchmarks/faults.py\n")
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {cpu_name()},")
    print(
        f"{cores_and_load()}. {RANKS} ranks under mpirun, timeout {TIMEOUT_S} s; rank 1 makes the"
    )
    print("fault in its third step. Seconds from the fault to the end of the last process, the")
    print(
        f"job's exit code ({GIVE_UP_S} s: it was ended from outside), the first error of others.\n"
    )
    print("| fault | transport | seconds | exit code | message |\n|---|---|---|---|---|")
    for kind in args.kinds.split(","):
        for transport in args.transports.split(","):
            print(f"| {kind} | {transport} | {run(kind, transport)} |", flush=True)


def run(kind: str, transport: str) -> str:
    """The cells of one job."""
    with tempfile.TemporaryDirectory() as folder:
        rank = [sys.executable, str(Path(__file__).with_name("fault_rank.py"))]
        more = [kind, transport, folder, "--timeout", str(TIMEOUT_S)]
        try:
            done = subprocess.run(
                [*MPIRUN, "-n", str(RANKS), *rank, *more],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=GIVE_UP_S,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"{GIVE_UP_S} | - | does not end"
        end, fault = time.time(), Path(folder, "fault")
        took = f"{end - float(fault.read_text()):.1f}" if fault.exists() else "no fault"
        return f"{took} | {done.returncode} | {message(done.stdout.decode(errors='replace'))}"


def message(printed: str) -> str:
    """The first error of a rank that made no fault, without the library's own words."""
    found = [match for match in ERROR.findall(printed) if not match.startswith("rank 1 ")]
    if not found:
        return "-"
    told = LIBRARY.sub("", found[0]).replace("|", "\\|")
    return told[:LONGEST] + " ..." * (len(told) > LONGEST)


if __name__ == "__main__":
    main()
