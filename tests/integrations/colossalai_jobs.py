"""Starting jobs of several ranks for the ColossalAI tests, and comparing what they wrote."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dense import largest
from tests.helpers import run_command
from tests.integrations import deepspeed_jobs

Case = dict[str, Any]
Results = dict[str, dict[str, Any]]
FIXED = {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
IMPORTED = "tests.integrations.colossalai_worker"

needs_colossalai = pytest.mark.skipif(
    importlib.util.find_spec("colossalai") is None, reason="ColossalAI is not installed"
)


def python() -> tuple[str, ...]:
    """`python` for a rank: a fork of a process that has imported ColossalAI and transformers."""
    return deepspeed_jobs.python(IMPORTED)


def run_cases(cases: list[Case], ranks: int, folder: Path, timeout: float = 280.0) -> Results:
    """One job of `ranks` over all cases; what rank 0 returned, by the case's name.

    Raises:
        AssertionError: with the traceback of the rank that failed first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [*python(), "-m", IMPORTED, str(folder), str(ranks)]
    done = run_command(command, timeout, FIXED)
    assert not done.returncode, _first_error(folder) or done.stdout[-4000:]
    return {case["name"]: torch.load(folder / f"{case['name']}.pt") for case in cases}


def _first_error(folder: Path) -> str:
    """A traceback that is no mere consequence of another rank's end."""
    texts = [path.read_text() for path in sorted(folder.glob("*.error"))]
    return next((t for t in texts if "by peer" not in t), "\n".join(texts[:1]))[-6000:]


def relative(ours: float, expected: float) -> float:
    return abs(ours - expected) / abs(expected)


def assert_losses(result: dict[str, Any], tolerance: float = 1e-5) -> None:
    """Every step's loss, relative."""
    ours, expected = result["losses"], result["expected"]["losses"]
    assert len(ours) == len(expected) > 0
    worst = largest(map(relative, ours, expected))
    assert worst < tolerance, f"relative error {worst:.1e}: {ours} instead of {expected}"


def assert_as_near_as_16_bits(result: dict[str, Any]) -> None:
    """Losses are off float32's by little more, in the mean, than those of 16 bits in one process.

    In the mean: which step is furthest off is chance, and differs between kinds of CPU, since
    training carries every rounding on.
    """
    expected, alone = result["expected"]["losses"], result["narrow"]
    error, least = (fmean(map(relative, found, expected)) for found in (result["losses"], alone))
    assert least > 1e-5, "16 bits without sequence parallelism has no error to compare with"
    assert error < 1.5 * least, f"mean relative error {error:.1e}, in one process {least:.1e}"


def assert_tensors(ours: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Every tensor, relative to its largest element, or a hundredth of the largest of all.

    (Gradients of key biases are zero but for rounding.)
    """
    floor = 1e-2 * max(float(x.abs().max()) for x in expected.values())
    for name, value in expected.items():
        assert ours[name].shape == value.shape, name
        scale = max(float(value.abs().max()), floor)
        error = float((ours[name].float() - value).abs().max()) / scale
        assert error < tolerance, f"{name}: relative error {error:.1e}"


def assert_gradients(result: dict[str, Any], tolerance: float = 1e-5) -> None:
    """Those of the first step that this rank holds whole (a pipeline stage holds only some)."""
    expected, ours = result["expected"]["gradients"], result["gradients"]
    held = {n: g for n, g in expected.items() if n in ours and ours[n].shape == g.shape}
    assert len(held) >= min(4, len(expected))
    assert_tensors(ours, held, tolerance)


def assert_weights(result: dict[str, Any], tolerance: float = 1e-4) -> None:
    """All weights after training."""
    assert_tensors(result["weights"], result["expected"]["weights"], tolerance)
