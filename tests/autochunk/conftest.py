"""Plans of these tests follow from fixed rates of a CPU, not from how busy this machine is."""

from __future__ import annotations

import pytest

from wf_backends.autochunk import Rates, planning

CPU_RATES = Rates(
    launch_seconds=5e-6,
    flops_per_s=5e10,
    bytes_per_s=1e10,
    packed_bytes_per_s=1e10,
    interleaved_bytes_per_s=4e8,
    slice_seconds=5e-5,
    halo_seconds=4e-4,
)


@pytest.fixture(autouse=True)
def fixed_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "measure_rates", lambda *_: CPU_RATES)
