"""How a job ends when one rank fails: seconds to the end of the last rank, and the error messages.

Starts jobs of 4 ranks under mpirun, in which rank 1 makes a fault in a layer of its third step
(fault_rank.py), over gloo, over MPI as transport and under DeepSpeed.

    python benchmarks/faults.py > benchmarks/results/faults.md

36 rows, each a job of 4 new processes: about 10 minutes on 2 idle cores, half an hour on a busy
machine. A job has 10 minutes to reach its fault. `--kinds` and `--transports` select rows.
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
from measure import cores_and_load, cpu_name, print_head, print_row

RANKS, TIMEOUT_S = 4, 15
START_S, END_S = 600, 120  # longest time until the fault, and from it to the job's end
POLL_S = 0.05
KINDS = (*ENDINGS, *SKIPS, *CALLS, *TENSORS)
TRANSPORTS = ("gloo", "mpi", "deepspeed")
MPIRUN = ["mpirun", "--allow-run-as-root", "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]
MAX_CHARACTERS = 230  # of a message
ERROR = re.compile(r"\[rank[0-9]+\]: [\w.]*Error: ((?:global )?rank .*|the ranks do not agree.*)")
REPORT = "fault report:"
LIBRARY = re.compile(r"\[/\S+\] |This is typically caused.*?GLHF! \S+ ?| \[[\d.:]+\]:\d+")

HEAD = f"""# Faults of one rank

    python benchmarks/faults.py

torch {torch.__version__}, Python {platform.python_version()}, {{machine}}.
{RANKS} ranks under mpirun, timeout {TIMEOUT_S} s; rank 1 makes the fault in its third step.
Seconds from the fault to the end of the last process (ended from outside after {END_S} s), the
job's exit code, how many reports of the fault were printed, the first error of another rank.
"""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", default=",".join(KINDS), help="separated by commas")
    parser.add_argument("--transports", default=",".join(TRANSPORTS))
    args = parser.parse_args()
    print(HEAD.format(machine=f"{cpu_name()},\n{cores_and_load()}"), flush=True)
    print_head("fault", "transport", "seconds", "exit code", "reports", "message")
    for kind in args.kinds.split(","):
        for transport in args.transports.split(","):
            print_row(kind, transport, *run(kind, transport))


def run(kind: str, transport: str) -> list[str]:
    """The cells of one job."""
    with tempfile.TemporaryDirectory() as folder:
        rank = [sys.executable, str(Path(__file__).with_name("fault_rank.py"))]
        arguments = [kind, transport, folder, "--timeout", str(TIMEOUT_S)]
        fault, printed = Path(folder, "fault"), Path(folder, "printed")
        with printed.open("wb") as file:
            job = subprocess.Popen(
                [*MPIRUN, "-n", str(RANKS), *rank, *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            code = wait_for_end(job, fault)
        end, text = time.time(), printed.read_text(errors="replace")
        seconds = f"{end - float(fault.read_text()):.1f}" if fault.exists() else "no fault"
        return [seconds, code, str(text.count(REPORT)), message(text)]


def wait_for_end(job: subprocess.Popen[bytes], fault: Path) -> str:
    """Wait for the job: its exit code, or "ended from outside" after a time limit.

    The limit runs from the fault; before it ranks only start, which can take minutes.
    """
    started = time.time()
    while job.poll() is None:
        deadline = started + START_S
        if fault.exists():
            deadline = fault.stat().st_mtime + END_S
        if time.time() > deadline:
            job.terminate()  # mpirun ends its ranks, stopped ones too
            job.wait()
            return "ended from outside"
        time.sleep(POLL_S)
    return str(job.returncode)


def message(printed: str) -> str:
    """The first error of a rank without the fault, without the text that the library adds."""
    errors = [match for match in ERROR.findall(printed) if not match.startswith("rank 1 ")]
    if not errors:
        return "-"
    text = LIBRARY.sub("", errors[0]).replace("|", "\\|")
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]} ..."


if __name__ == "__main__":
    main()
