"""Jobs of a real Slurm, on two nodes: who each rank is, where ranks meet, and what they compute."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.dense import largest
from tests.helpers import ROOT, run_command
from wf_backends.launch.environment import SLURM_PORTS

pytestmark = pytest.mark.slurm

TWO_NODES = [str(ROOT / "tests" / "slurm_hosts.sh"), "2", "2"]
PROGRAM = [sys.executable, "-m", "tests.launch_program"]


def run(*command: str) -> str:
    """The output of a command on the first of two nodes with two CPUs each."""
    done = run_command([*TWO_NODES, *command], timeout=240)
    assert done.returncode == 0, done.stdout
    return done.stdout


def reports(folder: Path) -> list[dict[str, Any]]:
    """What each rank of tests/launch_program.py found, by rank."""
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted(found, key=lambda one: one["rank"])


def test_srun_joins_the_ranks_of_two_nodes(tmp_path: Path) -> None:
    run("srun", "-n", "4", *PROGRAM, str(tmp_path), "join")
    found = reports(tmp_path)
    places = [tuple(one[key] for key in ("rank", "local_rank", "local_size")) for one in found]
    assert places == [(0, 0, 2), (1, 1, 2), (2, 0, 2), (3, 1, 2)]
    for one in found:
        assert (one["launcher"], one["world_size"], one["sum of ranks"]) == ("slurm", 4, 6)
        assert one["environ"]["MASTER_ADDR"] == "node0" and one["again"]
        assert int(one["environ"]["MASTER_PORT"]) in SLURM_PORTS


def test_two_steps_of_one_job_meet_apart(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    steps = []
    for folder in folders:
        folder.mkdir()
        steps.append(" ".join(["srun --exact -N 2 -n 2", *PROGRAM, str(folder), "join"]))
    run("salloc", "-N", "2", "-n", "4", "sh", "-c", " & ".join([*steps, "wait"]))
    ports = set()
    for found in map(reports, folders):
        assert [(one["rank"], one["local_rank"], one["local_size"]) for one in found] == [
            (0, 0, 1),
            (1, 0, 1),
        ]
        ports |= {one["environ"]["MASTER_PORT"] for one in found}
    assert len(ports) == 2


def test_a_batch_script_without_srun_is_told_so(tmp_path: Path) -> None:
    script, said = tmp_path / "job.sh", tmp_path / "said.txt"
    code = "from wf_backends.launch import init; init(timeout=3)"
    script.write_text(f"#!/bin/sh\n{sys.executable} -c '{code}'\n")
    done = run_command([*TWO_NODES, "sbatch", "--wait", "-n", "4", f"--output={said}", str(script)])
    assert done.returncode != 0
    assert re.search(r"ranks \[1, 2, 3\] did not come", said.read_text()), said.read_text()


def test_attention_on_two_nodes_is_what_dense_attention_gives() -> None:
    told = run("srun", "-n", "4", sys.executable, "examples/attention.py")
    found = re.findall(r"worst difference to dense attention (\S+)", told)
    assert len(found) == 4 and largest(map(float, found)) < 1e-5, told


def test_bench_measures_two_nodes(tmp_path: Path) -> None:
    pytest.importorskip("typer", reason="the cli extra is not installed")
    args = ["--seqlen", "512", "--repeats", "1", "--top", "1", "--json"]
    cli = [sys.executable, "-m", "wf_backends.cli", "bench", "--cache-dir", str(tmp_path), *args]
    told = run("srun", "-n", "4", *cli)
    found = json.loads(told[told.index("{\n") : told.rindex("\n}") + 2])
    assert (found["topology"]["hosts"], found["topology"]["ranks_per_host"]) == (2, 2)
    assert all(plan["measured_s"] > 0 for plan in found["plans"])
