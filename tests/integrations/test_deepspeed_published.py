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
    run_cases,
    text,
    tiny_llama,
)

pytestmark = [pytest.mark.deepspeed, pytest.mark.processes]

RANKS, STEPS = 4, 3
FILES = sorted((ROOT / "configs" / "deepspeed").glob("*.json"))
NVME = pytest.mark.skipif(
    not deepspeed.ops.__compatible_ops__["async_io"],
    reason="DeepSpeed's async_io operator cannot be built here: it needs libaio-dev",
)


def name(path: Path) -> Any:
    return pytest.param(path.stem, marks=NVME) if "nvme" in path.stem else path.stem


def sequences(config: dict[str, Any]) -> int:
    """Sequences of one optimizer step over all ranks."""
    groups = RANKS // config["wallfacer"]["sequence_parallel_size"]
    return groups * config["gradient_accumulation_steps"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("published")
    cases = []
    for path in FILES:
        config = json.loads(path.read_text())
        if "nvme" in path.stem:
            if not deepspeed.ops.__compatible_ops__["async_io"]:
                continue
            for part in ("offload_optimizer", "offload_param"):
                config["zero_optimization"][part]["nvme_path"] = str(folder)
        cases.append(
            {"name": path.stem, "config": config, "steps": STEPS, "sequences": sequences(config)}
        )
    return run_cases(cases, RANKS, folder)


@pytest.mark.parametrize("stem", [name(path) for path in FILES])
def test_a_published_setting_trains(stem: str, trained: dict[str, dict[str, Any]]) -> None:
    config = json.loads((ROOT / "configs" / "deepspeed" / f"{stem}.json").read_text())
    losses = trained[stem]["losses"]
    with torch.no_grad():
        model = tiny_llama()
        shares = [dense_loss_sum(model, b) for b in islice(text(0), sequences(config))]
    if config["wallfacer"].get("loss_average") == "token":
        expected = sum(float(s) for s, _ in shares) / sum(n for _, n in shares)
    else:
        expected = sum(float(s) / n for s, n in shares) / len(shares)
    assert losses[0] == pytest.approx(expected, rel=1e-2 if "bf16" in config else 1e-5)
    assert len(losses) == STEPS and all(math.isfinite(loss) for loss in losses)
    assert trained[stem]["sent"] > 0


def mpirun(*arguments: str) -> str:
    """The example on 4 ranks under the mpirun beside this Python; what it printed."""
    beside = Path(sys.executable).with_name("mpirun")
    program = str(beside) if beside.exists() else shutil.which("mpirun")
    assert program is not None
    options = ["--allow-run-as-root", "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]
    command = [program, *options, "-n", "4", sys.executable, "examples/pretrain.py", *arguments]
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
