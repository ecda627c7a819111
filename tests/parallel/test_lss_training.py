"""The byte-level language model under LSS Transformer: the losses of one rank, dropout and all."""

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

WORDS = json.loads((ROOT / "configs" / "lss" / "lss.json").read_text())
TEXT = (ROOT / "LICENSE").read_bytes()


@pytest.fixture(scope="module")
def right():
    return run_threads(1, train_lss.train, WORDS, TEXT, 4)[0]


@pytest.mark.parametrize("num_ranks", (2, 3, 4))
def test_training_on_text_equals_one_rank(num_ranks, right):
    """1000 bytes are no multiple of 2 P for 3 ranks: padded, and still equal."""
    for losses in run_threads(num_ranks, train_lss.train, WORDS, TEXT, 4):
        assert losses == pytest.approx(right, abs=1e-5)
    assert right[-1] < right[0] - 0.5


def test_dropout_is_at_work(right):
    words = WORDS | {"model": WORDS["model"] | {"dropout": 0.0}}
    ((first, *_),) = run_threads(1, train_lss.train, words, TEXT, 1)
    assert abs(first - right[0]) > 1e-4


def test_two_replicas_of_two_ranks_equal_two_replicas():
    def words(size):
        return WORDS | {"wallfacer": {"strategy": "lss", "sequence_parallel_size": size}}

    alone = run_threads(2, train_lss.train, words(1), TEXT, 2)
    for rank, losses in enumerate(run_threads(4, train_lss.train, words(2), TEXT, 2)):
        assert losses == pytest.approx(alone[rank // 2], abs=1e-5)


@pytest.mark.parametrize("layout", ("zigzag", "contiguous"))
@pytest.mark.parametrize("num_ranks", (2, 3, 8))
def test_dropout_falls_on_the_same_elements(layout, num_ranks):
    x = torch.randn(2, 37, 5)
    whole = position_dropout(x, torch.arange(37), 0.3, seed=7)
    for shard in make_layout(layout, num_ranks, 37):
        at = positions(shard)
        assert torch.equal(position_dropout(x[:, at], at, 0.3, seed=7), whole[:, at])


def test_dropout_is_fair_and_scaled():
    x = torch.ones(4, 500, 100)
    for p in (0.1, 0.5):
        seen = [position_dropout(x, torch.arange(500), p, seed) for seed in range(3)]
        for out in seen:
            assert set(out.unique().tolist()) == {0.0, out.max().item()}
            assert out.max().item() == pytest.approx(1 / (1 - p))
            for dims in ((0, 1), (1, 2), (0, 2), (0, 1, 2)):
                share = (out == 0).double().mean(dims)
                count = x.numel() / share.numel()
                assert ((share - p).abs() < 6 * (p * (1 - p) / count) ** 0.5).all()
        both = ((seen[0] == 0) & (seen[1] == 0)).double().mean().item()
        assert both == pytest.approx(p * p, abs=0.01)
    assert torch.equal(position_dropout(x, torch.arange(500), 0.0, 1), x)


def test_bad_input():
    with pytest.raises(ValueError, match=r"p must be in \[0, 1\), got 1"):
        position_dropout(torch.ones(1, 2, 3), torch.arange(2), 1.0, 0)
    with pytest.raises(ValueError, match="--data must hold at least 1000 bytes, got 3"):
        run_threads(1, train_lss.train, WORDS, b"abc", 1)
