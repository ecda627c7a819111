"""Jobs of a real Slurm on two nodes: the ranks' numbers, their rendezvous, and attention."""

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
    """The report of each rank of tests/launch_program.py, by rank."""
    by_file = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted(by_file, key=lambda report: report["rank"])


def numbers(folder: Path) -> list[tuple[int, int, int]]:
    """(rank, local_rank, local_size) of each rank."""
    keys = ("rank", "local_rank", "local_size")
    return [tuple(report[key] for key in keys) for report in reports(folder)]


def test_srun_joins_the_ranks_of_two_nodes(tmp_path: Path) -> None:
    run("srun", "-n", "4", *PROGRAM, str(tmp_path), "join")
    assert numbers(tmp_path) == [(0, 0, 2), (1, 1, 2), (2, 0, 2), (3, 1, 2)]
    for report in reports(tmp_path):
        assert (report["launcher"], report["world_size"], report["sum of ranks"]) == ("slurm", 4, 6)
        assert report["environ"]["MASTER_ADDR"] == "node0" and report["second init is equal"]
        assert int(report["environ"]["MASTER_PORT"]) in SLURM_PORTS


def test_two_steps_of_one_job_meet_at_different_ports(tmp_path: Path) -> None:
    folders = [tmp_path / "step0", tmp_path / "step1"]
    steps = []
    for folder in folders:
        folder.mkdir()
        steps.append(" ".join(["srun --exact -N 2 -n 2", *PROGRAM, str(folder), "join"]))
    run("salloc", "-N", "2", "-n", "4", "sh", "-c", " & ".join([*steps, "wait"]))
    assert [numbers(folder) for folder in folders] == 2 * [[(0, 0, 1), (1, 0, 1)]]
    ports = {report["environ"]["MASTER_PORT"] for folder in folders for report in reports(folder)}
    assert len(ports) == 2


def test_a_batch_script_without_srun_names_the_missing_ranks(tmp_path: Path) -> None:
    script, output = tmp_path / "job.sh", tmp_path / "output.txt"
    code = "from wf_backends.launch import init; init(timeout=3)"
    script.write_text(f"#!/bin/sh\n{sys.executable} -c '{code}'\n")
    sbatch = ["sbatch", "--wait", "-n", "4", f"--output={output}", str(script)]
    assert run_command([*TWO_NODES, *sbatch]).returncode != 0
    assert re.search(r"ranks \[1, 2, 3\] did not come", output.read_text()), output.read_text()


def test_attention_on_two_nodes_equals_dense_attention() -> None:
    printed = run("srun", "-n", "4", sys.executable, "examples/attention.py")
    errors = re.findall(r"worst difference to dense attention (\S+)", printed)
    assert len(errors) == 4 and largest(map(float, errors)) < 1e-5, printed  # float32


def test_bench_measures_two_nodes(tmp_path: Path) -> None:
    pytest.importorskip("typer", reason="the cli extra is not installed")
    args = ["--seqlen", "512", "--repeats", "1", "--top", "1", "--json"]
    cli = [sys.executable, "-m", "wf_backends.cli", "bench", "--cache-dir", str(tmp_path), *args]
    printed = run("srun", "-n", "4", *cli)
    result = json.loads(printed[printed.index("{\n") : printed.rindex("\n}") + 2])
    assert (result["topology"]["hosts"], result["topology"]["ranks_per_host"]) == (2, 2)
    assert all(plan["measured_s"] > 0 for plan in result["plans"])
