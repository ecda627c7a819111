"""Every file of configs/deepspeed is loaded and trains; the example runs under mpirun."""

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
    text,
    tiny_llama,
)
from tests.long import selected_cases  # noqa: E402

pytestmark = [pytest.mark.deepspeed, pytest.mark.processes]

RANKS, STEPS = 4, 3
FILES = sorted((ROOT / "configs" / "deepspeed").glob("*.json"))
NVME = "nvme"  # in the name of settings that need an operator of DeepSpeed to be compiled
CPU_STEMS = [path.stem for path in FILES if NVME not in path.stem]
NVME_STEMS = [path.stem for path in FILES if NVME in path.stem]


def load(stem: str) -> dict[str, Any]:
    return json.loads((ROOT / "configs" / "deepspeed" / f"{stem}.json").read_text())


def case(stem: str, folder: Path) -> dict[str, Any]:
    """The setting as a case for the worker; what it offloads to NVMe goes into `folder`."""
    config = load(stem)
    for part in config["zero_optimization"].values():
        if isinstance(part, dict) and part.get("device") == NVME:
            part["nvme_path"] = str(folder)
    return {"name": stem, "config": config, "steps": STEPS, "sequences": sequences(config)}


def sequences(config: dict[str, Any]) -> int:
    """Sequences of one optimizer step over all ranks."""
    groups = RANKS // config["wallfacer"]["sequence_parallel_size"]
    return groups * config["gradient_accumulation_steps"]


def first_loss(config: dict[str, Any]) -> float:
    """The loss before the first step, on one rank and by nothing of ours."""
    model = tiny_llama()
    with torch.no_grad():
        shares = [dense_loss_sum(model, b) for b in islice(text(0), sequences(config))]
    if config["wallfacer"].get("loss_average") == "token":
        return sum(float(loss) for loss, _ in shares) / sum(count for _, count in shares)
    return sum(float(loss) / count for loss, count in shares) / len(shares)


def assert_trains(found: dict[str, Any], config: dict[str, Any]) -> None:
    losses = found["losses"]
    tolerance = 1e-2 if "bf16" in config else 1e-5
    assert losses[0] == pytest.approx(first_loss(config), rel=tolerance)
    assert len(losses) == STEPS and all(math.isfinite(loss) for loss in losses)
    assert found["sent"] > 0


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("published")
    asked = [case(stem, folder) for stem in selected_cases(request, CPU_STEMS, "stem")]
    return run_cases(asked, RANKS, folder)


@pytest.mark.parametrize("stem", CPU_STEMS)
def test_a_published_setting_trains(stem: str, trained: dict[str, dict[str, Any]]) -> None:
    assert_trains(trained[stem], load(stem))


@pytest.mark.skipif(
    not deepspeed.ops.__compatible_ops__["async_io"],
    reason="DeepSpeed's async_io operator cannot be built here: it needs libaio-dev",
)
@pytest.mark.timeout(900)  # the operator is compiled at its first use: 5 minutes on two cores
@pytest.mark.parametrize("stem", NVME_STEMS)
def test_a_published_setting_trains_with_nvme(stem: str, tmp_path: Path) -> None:
    found = run_cases([case(stem, tmp_path)], RANKS, tmp_path, timeout=800)
    assert_trains(found[stem], load(stem))


def mpirun(*arguments: str) -> str:
    """The example on 4 ranks under the mpirun beside this Python; what it printed."""
    beside = Path(sys.executable).with_name("mpirun")
    program = str(beside) if beside.exists() else shutil.which("mpirun")
    assert program is not None
    options = ["--allow-run-as-root", "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]
    command = [program, *options, "-n", "4", *python(), "examples/pretrain.py", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), timeout=200, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.mpi
def test_the_example_trains_saves_resumes_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    if shutil.which("mpirun") is None and not Path(sys.executable).with_name("mpirun").exists():
        pytest.skip("there is no mpirun")
    config = str(ROOT / "configs" / "deepspeed" / "zero2_concentric.json")
    shared = ["--deepspeed_config", config, "--seq-len", "256", "--out", str(tmp_path)]
    mpirun(*shared, "--steps", "4", "--save-every", "2")
    printed = mpirun(*shared, "--steps", "6", "--resume")
    assert "held-out loss" in printed and str(tmp_path / "loss.png") in printed
    rows = (tmp_path / "loss.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["step", "1", "2", "3", "4", "5", "6"]
    losses = [float(row.split(",")[1]) for row in rows[1:]]
    assert losses[-1] < losses[0] - 0.5
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
