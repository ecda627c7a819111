"""A cache whose layer has a window keeps what later tokens see, whatever came before."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.decode.test_cache import DIM, TOLERANCE, make_sp
from tests.dense import dense_attention
from tests.helpers import run_threads
from wf_backends.comm import Communicator, World
from wf_backends.decode import KeyValueCache
from wf_backends.decode.cache import BLOCK
from wf_backends.schedule import make_mask

WINDOW, SLACK = (19, -1), 7
PROMPT = 400
CALLS = (*[1] * 40, 150, 1, 5, *[1] * 140, 30)  # new tokens of each call
STARTS = list(accumulate(CALLS, initial=PROMPT))
TOTAL = STARTS[-1]


@lru_cache
def draw(total: int = TOTAL) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of two samples."""
    rng = torch.Generator().manual_seed(0)
    shapes = ((4, DIM), (2, DIM), (2, DIM))
    return tuple(
        torch.randn(2, total, *shape, generator=rng, dtype=torch.float64) for shape in shapes
    )


def filled(comm: Communicator, layout: str = "zigzag", prompt: int = PROMPT) -> KeyValueCache:
    """A cache of a prompt."""
    sp, (_, k, v) = make_sp(comm, layout), draw(max(prompt, TOTAL))
    cache = KeyValueCache(sp, WINDOW, SLACK)
    cache.keep(sp.shard(k[:, :prompt]), sp.shard(v[:, :prompt]), prompt)
    return cache


def call(cache: KeyValueCache, start: int, stop: int) -> Tensor:
    """The attention of tokens that come at once."""
    return cache.attention(*(x[:, start:stop] for x in draw()))


def expected() -> Tensor:
    return dense_attention(*draw(), make_mask(True, WINDOW), DIM**-0.5)


def rows_of(cache: KeyValueCache) -> float:
    """Keys on this rank."""
    return cache.nbytes / (2 * 2 * 2 * DIM * 8)  # samples, heads, K and V, float64


def decode(comm: Communicator, layout: str) -> tuple[Tensor, list[float]]:
    """What new tokens get, and the keys on this rank after each call."""
    cache, outs, rows = filled(comm, layout), [], []
    for start, stop in pairwise(STARTS):
        outs.append(call(cache, start, stop))
        rows.append(rows_of(cache))
    assert cache.length == TOTAL
    return torch.cat(outs, dim=1), rows


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_new_tokens_get_the_attention_of_one_device(ranks: int, layout: str):
    for out, _ in run_threads(ranks, decode, layout):
        assert (out - expected()[:, PROMPT:]).abs().max() < TOLERANCE


@pytest.mark.parametrize("ranks", [1, 3])
def test_all_ranks_together_keep_the_window_the_slack_and_less_than_a_block(ranks: int):
    totals = map(sum, zip(*(rows for _, rows in run_threads(ranks, decode, "zigzag")), strict=True))
    assert max(totals) < WINDOW[0] + SLACK + BLOCK


def test_a_longer_prompt_keeps_no_more_keys():
    def rows(comm: Communicator) -> list[float]:
        return [rows_of(filled(comm, prompt=prompt)) for prompt in (400, 4000)]

    short, long = map(sum, zip(*run_threads(2, rows), strict=True))
    assert short == long == WINDOW[0] + SLACK


def test_tokens_that_were_taken_back_come_again_exactly():
    def again(comm: Communicator) -> list[Tensor]:
        """The same three tokens, after `SLACK` tokens are taken back at every step."""
        cache, outs = filled(comm), []
        for start in range(PROMPT, PROMPT + BLOCK + SLACK):
            call(cache, start, start + SLACK)
            cache.crop(start)
            outs.append(call(cache, start, start + 1))
        return outs

    for outs in run_threads(2, again):
        out = torch.cat(outs, dim=1)
        assert (out - expected()[:, PROMPT : PROMPT + BLOCK + SLACK]).abs().max() < TOLERANCE


def test_more_tokens_than_the_slack_are_not_taken_back():
    def refused(comm: Communicator) -> str:
        cache = filled(comm)
        cache.crop(PROMPT - SLACK)
        with pytest.raises(ValueError) as error:
            cache.crop(PROMPT - SLACK - 1)
        assert cache.length == PROMPT - SLACK
        return str(error.value)

    for text in run_threads(2, refused):
        assert f"crop({PROMPT - SLACK - 1}) of {PROMPT - SLACK} tokens" in text
        assert f"leaves {PROMPT - SLACK} tokens at least" in text and "slack=" in text


def test_fewer_tokens_than_none_are_refused():
    cache = filled(World(1).comm(0))
    with pytest.raises(ValueError, match="crop.-1.: give the number of tokens to keep"):
        cache.crop(-1)
    assert cache.length == PROMPT


def test_an_emptied_cache_takes_another_prompt():
    def again(comm: Communicator) -> Tensor:
        cache = filled(comm)
        cache.crop(0)
        sp, (_, k, v) = make_sp(comm), draw()
        cache.keep(sp.shard(k[:, :PROMPT]), sp.shard(v[:, :PROMPT]), PROMPT)
        return call(cache, PROMPT, PROMPT + 3)

    for out in run_threads(2, again):
        assert (out - expected()[:, PROMPT : PROMPT + 3]).abs().max() < TOLERANCE


@pytest.mark.parametrize("slack", [-1, 1.5, "4"])
def test_a_slack_that_is_no_number_of_tokens_is_refused(slack: Any):
    with pytest.raises(ValueError, match=f"slack must be a number of tokens.*got {slack!r}"):
        KeyValueCache(make_sp(World(1).comm(0)), WINDOW, slack)


def test_windows_wider_than_all_tokens_drop_nothing():
    def rows(comm: Communicator) -> float:
        cache = KeyValueCache(sp := make_sp(comm), (PROMPT, -1), 0)
        _, k, v = draw()
        cache.keep(sp.shard(k[:, :PROMPT]), sp.shard(v[:, :PROMPT]), PROMPT)
        cache.crop(1)
        return rows_of(cache)

    assert sum(run_threads(2, rows)) == 1
