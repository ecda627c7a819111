"""Attention to chosen keys: exact beside dense attention with a mask; refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import run_threads
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.sparse import SparseAttention, readers

SEQLEN, BATCH, HEADS, DIM, VALUE_DIM = 24, 2, 4, 6, 5


def draw(heads: int, per_head: bool) -> tuple[Tensor, ...]:
    """q, k, v of the whole sequence, and up to 5 chosen keys of each row; some rows have none."""
    generator = torch.Generator().manual_seed(0)
    shapes = (HEADS, DIM), (heads, DIM), (heads, VALUE_DIM)
    q, k, v = (
        torch.randn(BATCH, SEQLEN, *x, dtype=torch.float64, generator=generator) for x in shapes
    )
    scores = torch.rand(BATCH, SEQLEN, heads if per_head else 1, SEQLEN, generator=generator)
    seen = torch.ones(SEQLEN, SEQLEN).tril()[:, None].bool()
    chosen = scores.masked_fill(~seen, -1).topk(5).indices
    chosen = chosen.masked_fill(~seen.expand_as(scores).gather(-1, chosen), -1)
    chosen[:, 3] = -1
    return q, k, v, chosen


def dense(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, sinks: Tensor | None = None) -> Tensor:
    """The same by a mask of all keys."""
    k, v = (x.repeat_interleave(HEADS // x.shape[2], 2) for x in (k, v))
    seen = torch.zeros(*chosen.shape[:3], SEQLEN + 1, dtype=torch.bool)
    seen = seen.scatter(-1, chosen.masked_fill(chosen < 0, SEQLEN), True)[..., :-1].transpose(1, 2)
    seen = seen.repeat_interleave(HEADS // seen.shape[1], 1)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    p = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        p = torch.cat((p, sinks[None, :, None, None].expand(*p.shape[:3], 1)), -1)
    p = p.softmax(-1).nan_to_num(0.0)[..., :SEQLEN]
    return torch.einsum("bhij,bjhe->bihe", p, v)


def gradients(out: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)  # ranks are threads
    dout = torch.randn(out.shape, generator=generator).bfloat16()  # exact in all dtypes
    return out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))


def roundings(dtype: torch.dtype, attend: Callable[..., Tensor], *inputs: Tensor) -> list[float]:
    """Errors of the output and the gradients in `dtype` / those of rounding what is exact, once."""
    halves = [x.to(dtype).requires_grad_() for x in inputs]
    doubles = [x.detach().double().requires_grad_() for x in halves]
    results = [gradients(attend(*leaves), *leaves) for leaves in (halves, doubles)]
    pairs = zip(*results, strict=True)
    return [float((x - y).norm() / (y.to(dtype) - y).norm()) for x, y in pairs]


def sequence_parallel(comm: Any, layout: str = "zigzag") -> SequenceParallel:
    config = SequenceParallelConfig(sequence_parallel_size=comm.size, layout=layout)
    return SequenceParallel(config, comm)


def over_ranks(
    comm: Any, layout: str, inputs: list[Tensor], chosen: Tensor, options: dict[str, Tensor]
) -> list[Tensor]:
    """Whole outputs and gradients; those of `options` are summed over the ranks."""
    sp = sequence_parallel(comm, layout)
    whole = [x.clone().requires_grad_() for x in inputs]
    parts: dict[str, Any] = {name: x.clone().requires_grad_() for name, x in options.items()}
    q, k, v = map(sp.shard, whole)
    out = SparseAttention(sp)(q, k, v, sp.shard(chosen), **parts)
    results = gradients(sp.unshard(out), *whole, *parts.values())
    num_whole = 1 + len(whole)
    return [*results[:num_whole], *map(sp.sum_over_ranks, results[num_whole:])]


@pytest.mark.parametrize("block", [1, 1 << 24], ids=["row by row", "all rows"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("heads", "per_head"), [(1, False), (2, False), (2, True), (4, True)])
def test_outputs_and_gradients_are_those_of_dense_attention(
    heads: int, per_head: bool, size: int, layout: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "BLOCK_ELEMENTS", block)
    q, k, v, chosen = draw(heads, per_head)
    inputs = [q, k, v]
    sinks = torch.randn(HEADS, dtype=torch.float64, requires_grad=True)
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = gradients(dense(leaves[0], leaves[1], leaves[2], chosen, sinks), *leaves, sinks)
    for got in run_threads(size, over_ranks, layout, inputs, chosen, {"sinks": sinks.detach()}):
        torch.testing.assert_close(got, [*expected], rtol=0, atol=1e-12)


def test_an_empty_batch_has_empty_outputs_and_gradients() -> None:
    *inputs, chosen = (x[:0] for x in draw(2, True))
    results = run_threads(2, over_ranks, "zigzag", inputs, chosen, {})
    assert [x.shape for x in results[0]] == [
        (0, SEQLEN, HEADS, VALUE_DIM),
        *(x.shape for x in inputs),
    ]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_latents_are_the_keys_and_values_that_they_project_to(size: int) -> None:
    q, *_, chosen = draw(1, False)
    shared, latents, up = (
        torch.randn(*shape, dtype=torch.float64)
        for shape in ((BATCH, SEQLEN, 1, 2), (BATCH, SEQLEN, 1, 7), (HEADS, DIM - 2 + VALUE_DIM, 7))
    )
    leaves = [x.clone().requires_grad_() for x in (q, shared, latents, up)]
    both = torch.einsum("bjc,hxc->bjhx", leaves[2][:, :, 0], leaves[3])
    k = torch.cat((both[..., : DIM - 2], leaves[1].expand(-1, -1, HEADS, -1)), -1)
    expected = gradients(dense(leaves[0], k, both[..., DIM - 2 :], chosen), *leaves)
    inputs = [q, shared, latents]
    for got in run_threads(size, over_ranks, "zigzag", inputs, chosen, {"kv_up": up}):
        torch.testing.assert_close(got, [*expected], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_in_half_precision_are_rounded_once(dtype: torch.dtype) -> None:
    *qkv, chosen = draw(2, False)

    def rank(comm: Any) -> list[float]:
        sp = sequence_parallel(comm)

        def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
            return SparseAttention(sp)(q, k, v, sp.shard(chosen), sinks=sinks)

        return roundings(dtype, attend, *map(sp.shard, qkv), torch.linspace(-1, 1, HEADS))

    for out, dq, *dkv, dsinks in run_threads(2, rank):
        assert max(out, dq, dsinks) < 1.1
        assert max(dkv) < 1.5  # messages between ranks are in half precision


WRONG = {
    "shape": (lambda chosen: chosen[:, :-1], "chosen must be integers"),
    "heads": (lambda chosen: chosen.expand(-1, -1, 3, -1), "chosen must be integers"),
    "dtype": (lambda chosen: chosen.double(), "chosen must be integers .* of torch.float64"),
    "beyond": (lambda chosen: chosen + SEQLEN, r"positions of 24 tokens, or -1, got \d\d"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_choice_on_one_rank_is_refused_on_all(wrong: str) -> None:
    change, message = WRONG[wrong]
    q, k, v, chosen = draw(2, False)

    def rank(comm: Any) -> None:
        sp = sequence_parallel(comm)
        mine = sp.shard(chosen)
        with pytest.raises(ValueError, match=message if comm.rank == 1 else None):
            mine = change(mine) if comm.rank == 1 else mine
            SparseAttention(sp)(sp.shard(q), sp.shard(k), sp.shard(v), mine)

    run_threads(2, rank)


def test_ranks_that_differ_in_who_needs_a_gradient_are_refused() -> None:
    q, k, v, chosen = draw(1, False)

    def rank(comm: Any) -> None:
        sp = sequence_parallel(comm)
        keys = sp.shard(k).requires_grad_(comm.rank == 0)
        with pytest.raises(ValueError, match="needs a gradient"):
            SparseAttention(sp)(sp.shard(q), keys, sp.shard(v), sp.shard(chosen))

    run_threads(2, rank)


def test_messages_are_one_gather_and_one_reduce_scatter() -> None:
    """Each rank sends its rows of [k, v] to the others, and gets as many gradients."""
    q, k, v, chosen = draw(1, False)

    def rank(comm: Any) -> dict[str, int]:
        sp = sequence_parallel(comm)
        keys = sp.shard(k).requires_grad_()
        SparseAttention(sp)(sp.shard(q), keys, sp.shard(v), sp.shard(chosen)).sum().backward()
        return sp.report()

    num_bytes = BATCH * SEQLEN // 4 * (DIM + VALUE_DIM) * 8 * 3
    expected = {"forward chosen keys": num_bytes, "backward chosen keys": num_bytes}
    assert run_threads(4, rank) == [expected] * 4
