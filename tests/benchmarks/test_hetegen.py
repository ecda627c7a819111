"""benchmarks/hetegen_cores.py prints its table, with a small model."""

from __future__ import annotations

import pytest

from tests.helpers import ROOT

pytest.importorskip("transformers", reason="the transformers extra is missing")
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "benchmarks")
    import hetegen_cores


def test_two_threads_are_measured_beside_their_prediction(capsys: pytest.CaptureFixture[str]):
    hetegen_cores.cores_table(layers=3, width=64, rounds=1)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows[1:]] == list(hetegen_cores.ALPHAS)
