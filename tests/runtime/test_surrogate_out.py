"""What backward kernels are given as outputs: the rows' own where known, else stand-ins, once."""

from __future__ import annotations

import pytest
import torch

from wf_backends.runtime import surrogate_out as outputs
from wf_backends.runtime.surrogate_out import SurrogateOut


def drawn(num_rows: int = 12):
    """(dout, out, stats) of rows-first buffers, float64; delta is rowsum(dout * out)."""
    random = torch.Generator().manual_seed(0)
    shape = (num_rows, 2, 3, 4)
    dout, out = (torch.randn(shape, generator=random, dtype=torch.float64) for _ in range(2))
    delta = (dout * out).sum(-1)
    return dout, out, torch.stack((torch.zeros_like(delta), delta), dim=1)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each stand-in was made for."""
    found: list[int] = []
    inner = outputs.stand_in

    def counting(dout: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        found.append(dout.shape[1])
        return inner(dout, delta)

    monkeypatch.setattr(outputs, "stand_in", counting)
    return found


@pytest.mark.parametrize(
    "reads",
    [
        [((0, 12),), ((3, 7),)],
        [((3, 7),), ((0, 12),), ((0, 12),)],
        [((0, 2), (8, 12)), ((1, 9),), ((11, 12),)],
    ],
)
def test_every_row_is_computed_once_and_has_its_delta(reads, computed):
    dout, _, stats = drawn()
    held, seen = SurrogateOut(dout), set()
    for rows in reads:
        found = held.read(rows, stats)
        for start, stop in rows:
            got = (dout[start:stop] * found[start:stop]).sum(-1)
            torch.testing.assert_close(got, stats[start:stop, 1], rtol=1e-12, atol=1e-12)
            seen |= set(range(start, stop))
    assert sum(computed) == len(seen)


def test_known_outputs_are_given_as_they_are(computed):
    dout, out, stats = drawn()
    held = SurrogateOut(dout, out)
    assert held.read(((2, 5), (6, 9)), stats) is out
    assert not computed
