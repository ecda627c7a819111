"""Plans of these tests follow from one CPU's rates, not from how busy this machine is."""

from __future__ import annotations

import pytest

from wf_backends.autochunk import Rates, planning

CPU = Rates(5e-6, 5e10, 1e10, 1e10, 4e8, 5e-5, 4e-4)


@pytest.fixture(autouse=True)
def fixed_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "measure_rates", lambda *_: CPU)
