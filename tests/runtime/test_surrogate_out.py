"""Outputs for backward kernels: those of the rows where known, else stand-ins with their delta."""

from __future__ import annotations

import pytest
import torch

from wf_backends.runtime import surrogate_out
from wf_backends.runtime.surrogate_out import SurrogateOut, stand_in


def buffers():
    """dout, out and stats of 12 rows, rows first, in float64; stats are lse and delta."""
    random = torch.Generator().manual_seed(0)
    shape = (12, 2, 3, 4)
    dout, out = (torch.randn(shape, generator=random, dtype=torch.float64) for _ in range(2))
    delta = (dout * out).sum(-1)
    return dout, out, torch.stack((torch.zeros_like(delta), delta), dim=1)


@pytest.fixture
def rows_computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each call of `stand_in`."""
    counts: list[int] = []

    def counting(dout: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        counts.append(dout.shape[1])
        return stand_in(dout, delta)

    monkeypatch.setattr(surrogate_out, "stand_in", counting)
    return counts


@pytest.mark.parametrize(
    "reads",
    [
        [((0, 12),), ((3, 7),)],
        [((3, 7),), ((0, 12),), ((0, 12),)],
        [((0, 2), (8, 12)), ((1, 9),), ((11, 12),)],
    ],
)
def test_stand_ins_are_computed_once_a_row_and_have_its_delta(reads, rows_computed):
    dout, _, stats = buffers()
    surrogate, rows_read = SurrogateOut(dout), set()
    for rows in reads:
        out = surrogate.read(rows, stats)
        for start, stop in rows:
            delta = (dout[start:stop] * out[start:stop]).sum(-1)
            torch.testing.assert_close(delta, stats[start:stop, 1], rtol=1e-12, atol=1e-12)
            rows_read |= set(range(start, stop))
    assert sum(rows_computed) == len(rows_read)


def test_known_outputs_are_returned_as_they_are(rows_computed):
    dout, out, stats = buffers()
    assert SurrogateOut(dout, out).read(((2, 5), (6, 9)), stats) is out
    assert not rows_computed


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
@pytest.mark.parametrize("size", (1e-30, 1.0, 1e18))
def test_stand_in_for_out_has_its_delta(dtype, size):
    """rowsum(dout * out), with errors of the dtype's rounding; a row of dout may be zero."""
    random = torch.Generator().manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    dout = (torch.randn(1, 5, 2, 16, generator=random) * size).to(dtype)
    dout[:, 3] = 0
    out = torch.randn(1, 5, 2, 16, generator=random).to(dtype)
    delta = (dout.to(wide) * out.to(wide)).sum(-1).transpose(1, 2)
    actual = (dout.to(wide) * stand_in(dout, delta).to(wide)).sum(-1).transpose(1, 2)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
    assert ((actual - delta).abs() <= tolerance * delta.abs()).all()
