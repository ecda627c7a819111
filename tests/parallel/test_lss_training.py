"""examples/lss/train_lss.py, with dropout: the losses of one rank on any number of ranks."""

from __future__ import annotations

import json

import pytest
import torch

from tests.helpers import ROOT, run_threads
from wf_backends.parallel import position_dropout
from wf_backends.runtime.shards import positions
from wf_backends.schedule.layout import make_layout

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "examples" / "lss")
    import train_lss

CONFIG = json.loads((ROOT / "configs" / "lss" / "lss.json").read_text())
TEXT = (ROOT / "LICENSE").read_bytes()


@pytest.fixture(scope="module")
def expected():
    """Losses of four steps of one rank."""
    return run_threads(1, train_lss.train, CONFIG, TEXT, 4)[0]


@pytest.mark.parametrize("num_ranks", (2, 3, 4))
def test_losses_equal_those_of_one_rank(num_ranks, expected):
    """In float32: 1e-5. The 1000 bytes of a sequence need padding for 3 ranks."""
    for losses in run_threads(num_ranks, train_lss.train, CONFIG, TEXT, 4):
        assert losses == pytest.approx(expected, abs=1e-5)
    assert expected[-1] < expected[0] - 0.5


def test_the_config_drops_elements(expected):
    config = CONFIG | {"model": CONFIG["model"] | {"dropout": 0.0}}
    ((first_loss, *_),) = run_threads(1, train_lss.train, config, TEXT, 1)
    assert abs(first_loss - expected[0]) > 1e-4


def test_two_replicas_of_two_ranks_equal_two_replicas_of_one():
    def config(size):
        return CONFIG | {"wallfacer": {"strategy": "lss", "sequence_parallel_size": size}}

    expected = run_threads(2, train_lss.train, config(1), TEXT, 2)
    for rank, losses in enumerate(run_threads(4, train_lss.train, config(2), TEXT, 2)):
        assert losses == pytest.approx(expected[rank // 2], abs=1e-5)


@pytest.mark.parametrize("layout", ("zigzag", "contiguous"))
@pytest.mark.parametrize("num_ranks", (2, 3, 8))
def test_shards_drop_the_elements_that_the_sequence_drops(layout, num_ranks):
    x = torch.randn(2, 37, 5)
    expected = position_dropout(x, torch.arange(37), 0.3, seed=7)
    for shard in make_layout(layout, num_ranks, 37):
        rows = positions(shard)
        assert torch.equal(position_dropout(x[:, rows], rows, 0.3, seed=7), expected[:, rows])


X = torch.ones(4, 500, 100)
ROWS = torch.arange(500)


@pytest.mark.parametrize("p", (0.1, 0.5))
@pytest.mark.parametrize("seed", range(3))
def test_dropout_drops_a_share_p_along_every_dimension_and_scales_the_rest(p, seed):
    """Shares of every row, of every column, and of all are within six standard deviations."""
    out = position_dropout(X, ROWS, p, seed)
    assert set(out.unique().tolist()) == {0.0, out.max().item()}
    assert out.max().item() == pytest.approx(1 / (1 - p))
    for dims in ((0, 1), (1, 2), (0, 2), (0, 1, 2)):
        share = (out == 0).double().mean(dims)
        count = X.numel() / share.numel()
        assert ((share - p).abs() < 6 * (p * (1 - p) / count) ** 0.5).all()


@pytest.mark.parametrize("p", (0.1, 0.5))
def test_two_seeds_drop_independently(p):
    dropped = [position_dropout(X, ROWS, p, seed) == 0 for seed in range(2)]
    next_sample = dropped[0].roll(-1, 0)  # seed and sample are not just added
    for first in (dropped[0], next_sample):
        share_of_both = (first & dropped[1]).double().mean().item()
        assert share_of_both == pytest.approx(p * p, abs=0.01)


def test_dropout_of_0_changes_nothing():
    assert torch.equal(position_dropout(X, ROWS, 0.0, 1), X)


def test_dropout_of_1_is_refused():
    with pytest.raises(ValueError, match=r"p must be in \[0, 1\), got 1"):
        position_dropout(torch.ones(1, 2, 3), torch.arange(2), 1.0, 0)


def test_text_shorter_than_a_sequence_is_refused():
    with pytest.raises(ValueError, match="--data must hold at least 1000 bytes, got 3"):
        run_threads(1, train_lss.train, CONFIG, b"abc", 1)
