"""Runs jobs of several ranks with ColossalAI, and compares their results with one process."""

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
ENVIRON = {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
IMPORTED = "tests.integrations.colossalai_worker"

needs_colossalai = pytest.mark.skipif(
    importlib.util.find_spec("colossalai") is None, reason="ColossalAI is not installed"
)


def python() -> tuple[str, ...]:
    """`python` for a rank: a fork of a process that has imported ColossalAI and transformers."""
    return deepspeed_jobs.python(IMPORTED)


def run_cases(cases: list[Case], ranks: int, folder: Path, timeout: float = 280.0) -> Results:
    """Run all cases in one job of `ranks`; rank 0's results by the case's name.

    A case is a dict, as colossalai_worker.py reads it.

    Raises:
        AssertionError: with the traceback of the rank that failed first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [*python(), "-m", IMPORTED, str(folder), str(ranks)]
    done = run_command(command, timeout, ENVIRON)
    assert not done.returncode, _first_error(folder) or done.stdout[-4000:]
    return {case["name"]: torch.load(folder / f"{case['name']}.pt") for case in cases}


def _first_error(folder: Path) -> str:
    """The traceback of a rank that failed first: not because another one closed a connection."""
    tracebacks = [path.read_text() for path in sorted(folder.glob("*.error"))]
    first = next((text for text in tracebacks if "by peer" not in text), None)
    return (first or "\n".join(tracebacks[:1]))[-6000:]


def relative(actual: float, expected: float) -> float:
    """The relative error."""
    return abs(actual - expected) / abs(expected)


def assert_losses(result: dict[str, Any], tolerance: float = 1e-5) -> None:
    """The relative error of every step's loss."""
    actual, expected = result["losses"], result["expected"]["losses"]
    assert len(actual) == len(expected) > 0
    worst = largest(map(relative, actual, expected))
    assert worst < tolerance, f"relative error {worst:.1e}: {actual} instead of {expected}"


def assert_losses_in_16_bits(result: dict[str, Any]) -> None:
    """The mean error of the losses is at most 1.5 times that of one process in 16 bits.

    Both errors are relative to one process in float32. The mean, since training carries every
    rounding on: which step errs most is chance, and differs between CPUs.
    """
    expected = result["expected"]["losses"]
    error = fmean(map(relative, result["losses"], expected))
    of_one_process = fmean(map(relative, result["losses_in_16_bits"], expected))
    assert of_one_process > 1e-5, "one process in 16 bits has no error to compare with"
    assert error < 1.5 * of_one_process, f"{error:.1e}, in one process {of_one_process:.1e}"


def assert_tensors(
    actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float
) -> None:
    """Errors relative to a tensor's largest element, or to 1/100 of the largest of all tensors.

    (Gradients of key biases are zero but for rounding.)
    """
    assert actual.keys() >= expected.keys(), expected.keys() - actual.keys()
    floor = 1e-2 * max(float(x.abs().max()) for x in expected.values())
    for name, value in expected.items():
        assert actual[name].shape == value.shape, name
        scale = max(float(value.abs().max()), floor)
        error = float((actual[name].float() - value).abs().max()) / scale
        assert error < tolerance, f"{name}: relative error {error:.1e}"


def assert_gradients(
    result: dict[str, Any], tolerance: float = 1e-5, in_parts: bool = False
) -> None:
    """The first step's gradients.

    Args:
        in_parts: only those that rank 0 holds as a whole, at least four. Tensor parallelism and
            pipeline stages divide the others between the ranks.
    """
    actual, expected = result["gradients"], result["expected"]["gradients"]
    if in_parts:
        expected = {n: g for n, g in expected.items() if n in actual and actual[n].shape == g.shape}
        assert len(expected) >= 4
    assert_tensors(actual, expected, tolerance)


def assert_weights(result: dict[str, Any], tolerance: float = 1e-4) -> None:
    """All weights after training."""
    assert_tensors(result["weights"], result["expected"]["weights"], tolerance)
