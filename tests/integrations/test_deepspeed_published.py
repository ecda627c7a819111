"""Every file of configs/deepspeed trains on four ranks; examples/pretrain.py runs under mpirun."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed", exc_type=ImportError)
pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

import deepspeed.ops  # noqa: E402

from tests.integrations.deepspeed_jobs import (  # noqa: E402
    ROOT,
    dense_loss_sum,
    environment,
    python,
    run_cases,
    tiny_llama,
    token_batches,
)
from tests.long import selected_cases  # noqa: E402

pytestmark = [pytest.mark.deepspeed, pytest.mark.processes]

RANKS, STEPS = 4, 3
FILES = sorted((ROOT / "configs" / "deepspeed").glob("*.json"))
NVME = "nvme"  # in the names of files that need an operator of DeepSpeed to be compiled
CPU_STEMS = [path.stem for path in FILES if NVME not in path.stem]
NVME_STEMS = [path.stem for path in FILES if NVME in path.stem]


def load(stem: str) -> dict[str, Any]:
    return json.loads((ROOT / "configs" / "deepspeed" / f"{stem}.json").read_text())


def case(stem: str, folder: Path) -> dict[str, Any]:
    """Return the file as a case of deepspeed_worker.py; `folder` stands for the NVMe."""
    config = load(stem)
    for part in config["zero_optimization"].values():
        if isinstance(part, dict) and part.get("device") == NVME:
            part["nvme_path"] = str(folder)
    return {"name": stem, "config": config, "steps": STEPS, "sequences": num_sequences(config)}


def num_sequences(config: dict[str, Any]) -> int:
    """Return the sequences of one optimizer step over all ranks."""
    groups = RANKS // config["wallfacer"]["sequence_parallel_size"]
    return groups * config["gradient_accumulation_steps"]


def first_loss(config: dict[str, Any]) -> float:
    """Return the reference of the first loss: one rank, dense attention, none of our code."""
    model = tiny_llama()
    with torch.no_grad():
        sums = [dense_loss_sum(model, b) for b in islice(token_batches(0), num_sequences(config))]
    if config["wallfacer"].get("loss_average") == "token":
        return sum(float(loss) for loss, _ in sums) / sum(count for _, count in sums)
    return sum(float(loss) / count for loss, count in sums) / len(sums)


def assert_trains(result: dict[str, Any], config: dict[str, Any]) -> None:
    """The first loss is the reference's, in bf16 to 1% (8 significant bits); all are finite."""
    losses = result["losses"]
    tolerance = 1e-2 if "bf16" in config else 1e-5
    assert losses[0] == pytest.approx(first_loss(config), rel=tolerance)
    assert len(losses) == STEPS and all(math.isfinite(loss) for loss in losses)
    assert result["sent"] > 0


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("published")
    cases = [case(stem, folder) for stem in selected_cases(request, CPU_STEMS, "stem")]
    return run_cases(cases, RANKS, folder)


@pytest.mark.parametrize("stem", CPU_STEMS)
def test_a_published_config_trains(stem: str, results: dict[str, dict[str, Any]]) -> None:
    assert_trains(results[stem], load(stem))


@pytest.mark.skipif(
    not deepspeed.ops.__compatible_ops__["async_io"],
    reason="DeepSpeed's async_io operator cannot be built here: it needs libaio-dev",
)
@pytest.mark.timeout(900)  # the operator is compiled at its first use: 5 minutes on two cores
@pytest.mark.parametrize("stem", NVME_STEMS)
def test_a_published_config_trains_with_nvme(stem: str, tmp_path: Path) -> None:
    results = run_cases([case(stem, tmp_path)], RANKS, tmp_path, timeout=800)
    assert_trains(results[stem], load(stem))


def find_mpirun() -> str | None:
    """Return the mpirun of this Python's environment, else the system's."""
    in_environment = Path(sys.executable).with_name("mpirun")
    return str(in_environment) if in_environment.exists() else shutil.which("mpirun")


def run_example(mpirun: str, *arguments: str) -> str:
    """Run examples/pretrain.py on 4 ranks under mpirun; return its output."""
    options = ["--allow-run-as-root", "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]
    command = [mpirun, *options, "-n", "4", *python(), "examples/pretrain.py", *arguments]
    completed = subprocess.run(
        command, cwd=ROOT, env=environment(), timeout=200, capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stdout[-3000:] + completed.stderr[-3000:]
    return completed.stdout


@pytest.mark.mpi
def test_the_example_trains_saves_resumes_and_plots(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    mpirun = find_mpirun()
    if mpirun is None:
        pytest.skip("there is no mpirun")
    config = str(ROOT / "configs" / "deepspeed" / "zero2_concentric.json")
    arguments = ["--deepspeed_config", config, "--seq-len", "256", "--out", str(tmp_path)]
    run_example(mpirun, *arguments, "--steps", "4", "--save-every", "2")
    printed = run_example(mpirun, *arguments, "--steps", "6", "--resume")
    assert "held-out loss" in printed and str(tmp_path / "loss.png") in printed
    rows = (tmp_path / "loss.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["step", "1", "2", "3", "4", "5", "6"]
    losses = [float(row.split(",")[1]) for row in rows[1:]]
    assert losses[-1] < losses[0] - 0.5
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
