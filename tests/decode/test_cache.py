"""Attention of new tokens over a cache on several ranks, beside dense attention over all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dense import dense_attention
from tests.helpers import run_threads
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import Communicator, World
from wf_backends.decode import KeyValueCache
from wf_backends.decode.cache import BLOCK
from wf_backends.schedule import Mask, make_mask

PROMPT, HEADS, KV_HEADS, DIM, VALUE_DIM = 21, 4, 2, 8, 6
CHUNKS = (1, 1, 3, 1, 2, 1, 1, 1, 1, 1)  # new tokens of each call
TOTAL = PROMPT + sum(CHUNKS)
TOLERANCE = 1e-10
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_size": (6, -1)},
    "softcap": {"softcap": 2.0, "softmax_scale": 0.7},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)},
    "alibi": {"alibi_slopes": torch.tensor([0.1, 0.2, 0.4, 0.8], dtype=torch.float64)},
}


def make_sp(comm: Communicator, layout: str = "zigzag") -> SequenceParallel:
    config = SequenceParallelConfig(
        sequence_parallel_size=comm.size, layout=layout, route={"name": "ring"}
    )
    return SequenceParallel(config, comm)


def draw(batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of the prompt and all new tokens."""
    rng = torch.Generator().manual_seed(0)
    shapes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM))
    return tuple(
        torch.randn(batch, TOTAL, *shape, generator=rng, dtype=torch.float64) for shape in shapes
    )


def expected(options: dict[str, Any]) -> Tensor:
    """(b, TOTAL, h, e) by one dense softmax."""
    others = {key: x for key, x in options.items() if key not in ("window_size", "softmax_scale")}
    mask: Mask = make_mask(True, options.get("window_size", (-1, -1)))
    return dense_attention(*draw(), mask, options.get("softmax_scale", DIM**-0.5), **others)


def filled(
    sp: SequenceParallel, q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int] = (-1, -1)
) -> KeyValueCache:
    """A cache of the prompt."""
    cache = KeyValueCache(sp, window)
    cache.keep(sp.shard(k[:, :PROMPT]), sp.shard(v[:, :PROMPT]), PROMPT)
    return cache


def decode(comm: Communicator, layout: str, options: dict[str, Any]) -> Tensor:
    """What the new tokens get."""
    sp, qkv, others = make_sp(comm, layout), draw(), dict(options)
    cache, outs, start = filled(sp, *qkv, others.pop("window_size", (-1, -1))), [], PROMPT
    for count in CHUNKS:
        new = (x[:, start : start + count] for x in qkv)
        outs.append(cache.attention(*new, **others))
        start += count
    assert cache.length == TOTAL
    return torch.cat(outs, dim=1)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_new_tokens_get_the_attention_of_one_device(
    ranks: int, options: dict[str, Any], layout: str
):
    for out in run_threads(ranks, decode, layout, options):
        assert (out - expected(options)[:, PROMPT:]).abs().max() < TOLERANCE


def decode_padded(comm: Communicator, starts: Sequence[int]) -> Tensor:
    sp, (q, k, v) = make_sp(comm), draw()
    cache, new = filled(sp, q, k, v, (15, -1)), slice(PROMPT, PROMPT + 2)
    return cache.attention(q[:, new], k[:, new], v[:, new], starts=starts)


@pytest.mark.parametrize("ranks", [1, 3])
def test_new_tokens_do_not_see_padding_on_the_left(ranks: int):
    starts = (0, 9)
    rows = [x[:, : PROMPT + 2] for x in draw()]
    samples = [
        dense_attention(*(x[i : i + 1, start:] for x in rows), make_mask(True, (15, -1)), DIM**-0.5)
        for i, start in enumerate(starts)
    ]
    expected = torch.cat([out[:, -2:] for out in samples])
    for out in run_threads(ranks, decode_padded, starts):
        assert (out - expected).abs().max() < TOLERANCE


def test_all_ranks_get_equal_bits():
    first, *others = run_threads(4, decode, "zigzag", {})
    assert all(torch.equal(first, out) for out in others)


def decode_many(comm: Communicator) -> tuple[int, int]:
    """After 5 blocks of new tokens: bytes of this rank's cache, and the ranges of its tokens."""
    qkv = draw()
    cache, tokens = filled(make_sp(comm), *qkv), [x[:, :8] for x in qkv]
    for _ in range(5 * BLOCK // 8):
        cache.attention(*tokens)
    return cache.nbytes, len(cache._layout[comm.rank])


def test_a_rank_keeps_its_share_of_the_keys_in_few_ranges():
    results, row = run_threads(3, decode_many), 2 * KV_HEADS * (DIM + VALUE_DIM) * 8
    rows = [nbytes / row for nbytes, _ in results]
    assert sum(rows) == PROMPT + 5 * BLOCK
    assert max(rows) - min(rows) <= BLOCK
    assert max(ranges for _, ranges in results) <= 5


def decode_in_blocks(comm: Communicator, inference: tuple[bool, bool]) -> tuple[int, int, int]:
    """The buffers that 3 blocks of new tokens used, one token at a time, even and odd ones in these
    modes; the rows of the last one, and its rows after a crop."""
    cache, tokens, buffers = filled(make_sp(comm), *draw()), [x[:, :1] for x in draw()], []
    for i in range(3 * BLOCK):
        with torch.inference_mode(inference[i % 2]):
            cache.attention(*tokens)
        assert cache._kv is not None
        if not buffers or cache._kv is not buffers[-1]:
            buffers.append(cache._kv)
    cache.crop(PROMPT)
    return len(buffers), len(buffers[-1]), len(cache._kv)


@pytest.mark.parametrize("inference", [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("ranks", [1, 3])
def test_keys_are_copied_once_for_a_block_of_new_tokens(ranks: int, inference: tuple[bool, bool]):
    tokens = PROMPT + 3 * BLOCK
    for buffers, rows, rows_after_crop in run_threads(ranks, decode_in_blocks, inference):
        assert buffers <= 1 + 3
        assert rows <= tokens / ranks + 2 * BLOCK
        assert rows_after_crop <= PROMPT + BLOCK


def decode_samples_of_inference_mode(comm: Communicator) -> tuple[Tensor, Tensor]:
    """Two tokens, and the second again after samples were taken in inference mode."""
    sp, (q, k, v) = make_sp(comm), draw()
    cache = filled(sp, q, k, v)
    first, second = ([x[:, i : i + 1] for x in (q, k, v)] for i in (PROMPT, PROMPT + 1))
    cache.attention(*first)
    out = cache.attention(*second)
    cache.crop(PROMPT + 1)
    with torch.inference_mode():
        cache.take_samples(torch.tensor([0, 1]))
    return out, cache.attention(*second)


def test_a_cache_whose_samples_were_taken_in_inference_mode_continues_outside():
    for out, again in run_threads(2, decode_samples_of_inference_mode):
        assert torch.equal(out, again)


def decode_again(comm: Communicator) -> tuple[Tensor, Tensor]:
    """The last two tokens, and the same after the cache was cropped and its samples exchanged."""
    sp, (q, k, v) = make_sp(comm), draw()
    cache = filled(sp, q, k, v)
    new = [x[:, PROMPT : PROMPT + 2] for x in (q, k, v)]
    first = cache.attention(*new)
    cache.crop(PROMPT)
    cache.take_samples(torch.tensor([1, 0, 1]))
    return first, cache.attention(*(x[[1, 0, 1]] for x in new))


def test_a_cropped_cache_of_other_samples_continues():
    for first, again in run_threads(3, decode_again):
        assert torch.equal(again, first[[1, 0, 1]])


def refused(comm: Communicator, case: str) -> str:
    sp, (q, k, v) = make_sp(comm), draw()
    cache = KeyValueCache(sp) if case == "empty" else filled(sp, q, k, v)
    new = [x[:, PROMPT : PROMPT + 1] for x in (q, k, v)]
    if case == "batch":
        new = [x[:1] for x in new]
    elif case == "rank" and comm.rank == 1:
        new = [x[:, PROMPT : PROMPT + 2] for x in (q, k, v)]
    with pytest.raises(ValueError) as error:
        if case == "full":
            cache.keep(sp.shard(k[:, :PROMPT]), sp.shard(v[:, :PROMPT]), PROMPT)
        cache.attention(*new)
    return str(error.value)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("empty", "the cache is empty"),
        ("full", "an empty cache keeps the"),
        ("batch", "new keys and values must be as those of the cache"),
        ("rank", "shapes of new tokens"),
    ],
)
def test_wrong_calls_are_refused_on_every_rank(case: str, message: str):
    assert all(message in text for text in run_threads(2, refused, case))


@pytest.mark.parametrize("starts", ([9], [0, 9, 9], [0, -1], [0, PROMPT + 2]))
def test_starts_that_are_no_token_of_each_sample_are_refused(starts: list[int]):
    """A sample without a start got zeros."""
    for text in run_threads(2, refused_starts, starts):
        assert f"for each of the 2 samples, got {starts}: padding ends there" in text


def refused_starts(comm: Communicator, starts: list[int]) -> str:
    with pytest.raises(ValueError) as error:
        decode_padded(comm, starts)
    return str(error.value)


def test_a_cache_that_was_cropped_into_padding_says_to_what_it_may_be_cropped():
    sp, (q, k, v) = make_sp(World(1).comm(0)), draw()
    cache = filled(sp, q, k, v)
    cache.crop(5)
    message = (
        r"got \[0, 9\]: .* there are 6. .* is cropped to more tokens than its padding, or to 0"
    )
    with pytest.raises(ValueError, match=message):
        cache.attention(q[:, :1], k[:, :1], v[:, :1], starts=[0, 9])


def test_starts_that_differ_between_ranks_are_refused():
    def rank(comm: Communicator) -> str:
        return refused_starts(comm, [0, comm.rank])

    assert all("options" in text for text in run_threads(2, rank))


def test_layouts_that_follow_from_documents_are_refused():
    config = SequenceParallelConfig(layout="document_zigzag")
    with pytest.raises(ValueError, match='"zigzag" or "contiguous", got "document_zigzag"'):
        KeyValueCache(SequenceParallel(config))
