"""benchmarks/peers.py on 2 ranks: our schemes, and packages that are absent, wrong or broken."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT, run_command

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
SMALL = ["--tokens", "256", "--heads", "4", "--head-dim", "16", "--repeats", "2"]

# A package `ring_flash_attn`: one function is wrong, the other fails on one of the ranks.
WRONG_PACKAGE = """
import torch.distributed as dist

def zigzag_ring_flash_attn_func(q, k, v, causal):
    return q + k + v

def ring_flash_attn_func(q, k, v, causal):
    if dist.get_rank() == 1:
        raise RuntimeError("no ring")
    return q + k + v
"""

pytestmark = pytest.mark.processes


def run_peers(packages: str, *folders: Path, options: tuple[str, ...] = ()) -> list[str]:
    """The lines that the benchmark prints; packages in `folders` precede installed ones."""
    paths = os.pathsep.join(str(path) for path in (*folders, ROOT, ROOT / "integrations"))
    command = [
        *TORCHRUN,
        str(ROOT / "benchmarks" / "peers.py"),
        *SMALL,
        *options,
        "--only",
        packages,
    ]
    done = run_command(command, environ={"PYTHONPATH": paths})
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines()


def rows_of(lines: list[str]) -> dict[str, list[str]]:
    """The table's cells by the scheme's name."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    return {row[0]: row[1:] for row in rows[2:]}


def test_our_schemes_are_exact_and_the_network_sends_the_bytes_that_we_count():
    lines = run_peers("ours")
    rows = rows_of(lines)
    assert {"ours: Ring Attention", "ours: Ulysses", "ours: auto"} <= rows.keys()
    assert re.fullmatch(
        r"`ours: auto` takes \d\.\d\d x the CPU time of the best of ours, ours: .+\.", lines[-1]
    )
    for name, (*_, sent, counted, errors) in rows.items():
        assert all(float(error) < 2e-6 for error in errors.split("/")), (name, errors)  # float32
        busiest_rank = float(sent.split("/")[1])
        assert busiest_rank == pytest.approx(float(counted), rel=0.05), name  # gloo adds headers
    units = {name: float(row[-2]) for name, row in rows.items()}
    assert units["ours: Ulysses"] == 4.0  # (P-1)/P of 4 tensors there and 4 back


def test_our_schemes_are_exact_with_fewer_key_heads():
    rows = rows_of(run_peers("ours", options=("--kv-heads", "1")))
    for name in ("ours: Ring Attention", "ours: auto"):
        assert all(float(error) < 2e-6 for error in rows[name][-1].split("/")), rows[name]


def test_packages_that_are_absent_wrong_or_broken_are_named(tmp_path: Path):
    (tmp_path / "ring_flash_attn.py").write_text(WRONG_PACKAGE)
    (tmp_path / "yunchang.py").write_text('raise ImportError("it is not here")\n')
    lines = run_peers("yunchang,ring-flash-attn", tmp_path)
    errors = rows_of(lines)["ring-flash-attn: zigzag ring"][-1].split(" / ")
    assert all(error.startswith("**") for error in errors), errors
    assert "- yunchang: ImportError: it is not here" in lines
    assert "- ring-flash-attn, contiguous ring: RuntimeError: no ring" in lines


def test_an_unknown_package_is_refused():
    done = run_command([sys.executable, "benchmarks/peers.py", "--only", "ours,fsdp"])
    assert done.returncode != 0
    assert "got ['fsdp']" in done.stdout
