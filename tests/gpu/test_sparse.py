"""Attention to chosen keys, and to windows and entries, on ranks that share one GPU.

float64 is that of dense attention; in other dtypes it errs as torch's attention under a mask does.
"""

from __future__ import annotations

import warnings
from functools import cache, partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tests.dense import largest
from tests.gpu.compare import GPU_TOLERANCES
from tests.gpu.ranks_on_gpu import DEVICE
from tests.helpers import run_threads
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import Communicator, World
from wf_backends.sparse import CompressedAttention, SparseAttention, readers
from wf_backends.sparse.compressed import Entries, Groups

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(100)]

SEQLEN, HEADS, KV_HEADS, DIM, CHOSEN = 1072, 8, 2, 64, 96
RATIO, REACH, WINDOW = 4, 8, 128
BORDERS = (0, 357, 358, 613, SEQLEN)
MAX_ERROR_RATIO = 1.2
"""Of the error in bfloat16 to that of torch's attention under a mask, which rounds a result once.
So does ours, but gradients of keys, whose parts of each rank are messages in bfloat16."""
BOUNDS = {torch.float64: 1e-10, torch.float32: GPU_TOLERANCES[torch.float32]}
DTYPES = (*BOUNDS, torch.bfloat16)
NAMES = ("out", "dq", "dk", "dv", "dsinks"), ("out", "dq", "dkv", "dx", "dsinks")
DRAW = SequenceParallelConfig.from_dict


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Tensors that bfloat16 holds, in float64, the same on every rank; then the sinks."""
    random = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=random).bfloat16().double() for shape in shapes]
    return [x.to(DEVICE) for x in (*tensors, torch.linspace(-1, 2.5, HEADS).double())]


def sparse_inputs() -> list[Tensor]:
    """q, k, v, dout, sinks"""
    q, keys = (1, SEQLEN, HEADS, DIM), (1, SEQLEN, KV_HEADS, DIM)
    return drawn(q, keys, keys, q)


def compressed_inputs() -> list[Tensor]:
    """q, kv, what entries are made of, dout, sinks"""
    q, keys = (1, SEQLEN, HEADS, DIM), (1, SEQLEN, DIM)
    return drawn(q, keys, keys, q)


@cache
def choice(per_head: bool) -> Tensor:
    """(1, S, g or 1, CHOSEN): keys up to the row's own; row 3 has none."""
    random = torch.Generator().manual_seed(1)
    causal = torch.ones(SEQLEN, SEQLEN).tril()[:, None].bool()
    scores = torch.rand(1, SEQLEN, KV_HEADS if per_head else 1, SEQLEN, generator=random)
    chosen = scores.masked_fill(~causal, -1).topk(CHOSEN).indices
    chosen = chosen.masked_fill(~causal.expand_as(scores).gather(-1, chosen), -1)
    chosen[:, 3] = -1
    return chosen.to(DEVICE)


def torchs_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sinks: Tensor) -> Tensor:
    """The sinks are a column of the mask, beside a key and a value of zeros.

    q (1, S, h, d), k and v (1, T, g, d), seen (1, g or 1, S, T) bool.
    """
    zeros = k.new_zeros(1, 1, *k.shape[2:])
    keys, values = (torch.cat((x, zeros), 1).transpose(1, 2) for x in (k, v))
    keys, values = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (keys, values))
    hidden = torch.zeros(seen.shape, device=DEVICE, dtype=q.dtype).masked_fill(~seen, -torch.inf)
    hidden = hidden.repeat_interleave(HEADS // hidden.shape[1], 1)
    column = sinks.to(q.dtype)[None, :, None, None].expand(1, -1, SEQLEN, 1)
    mask = torch.cat((hidden, column), -1)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        out = scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask)
    return out.transpose(1, 2)


def sparse_by_torch(dtype: torch.dtype, per_head: bool) -> list[Tensor]:
    """out, dq, dk, dv, dsinks"""
    *leaves, dout, sinks = (x.to(dtype).requires_grad_() for x in sparse_inputs())
    chosen = choice(per_head)
    index = chosen.masked_fill(chosen < 0, SEQLEN)
    seen = torch.zeros(*chosen.shape[:3], SEQLEN + 1, dtype=torch.bool, device=DEVICE)
    seen = seen.scatter(-1, index, True)[..., :-1].transpose(1, 2)
    out = torchs_attention(*leaves, seen, sinks)
    return [out.detach(), *torch.autograd.grad(out, [*leaves, sinks], dout)]


def sparse_on_ranks(comm: Communicator, dtype: torch.dtype, per_head: bool) -> list[Tensor]:
    """The same."""
    sp = SequenceParallel(DRAW({"sequence_parallel_size": comm.size}), comm)
    *qkv, dout, sinks = (x.to(dtype) for x in sparse_inputs())
    leaves, sinks = [sp.shard(x).requires_grad_() for x in qkv], sinks.requires_grad_()
    with torch.autograd.set_multithreading_enabled(False):
        out = SparseAttention(sp)(*leaves, sp.shard(choice(per_head)), sinks=sinks)
        *grads, dsinks = torch.autograd.grad(out, [*leaves, sinks], sp.shard(dout))
    return [*(sp.unshard(x).detach() for x in (out, *grads)), sp.sum_over_ranks(dsinks)]


def pool(groups: Groups) -> Tensor:
    """A weighted mean of the rows that are there."""
    weights = torch.arange(1.0, 1 + groups.rows.shape[2], device=groups.rows.device)
    weights = torch.where(groups.is_there, weights, 0.0).to(groups.rows.dtype) / 16
    return (groups.rows * weights.unsqueeze(-1)).mean(2)


def entries_of(x: Tensor) -> Tensor:
    """(1, T, d): the entries of a document."""
    padded, entries = torch.cat((x.new_zeros(1, REACH, DIM), x), 1), [x.new_empty(1, 0, DIM)]
    for stop in range(RATIO, x.shape[1] + 1, RATIO):
        is_there = (torch.arange(stop - REACH, stop) >= 0)[None].to(DEVICE)
        entries.append(pool(Groups(padded[:, None, stop : stop + REACH], is_there, is_there)))
    return torch.cat(entries, 1)


def compressed_by_torch(dtype: torch.dtype, documents: bool) -> list[Tensor]:
    """out, dq, dkv, dx, dsinks"""
    *leaves, dout, sinks = (x.to(dtype).requires_grad_() for x in compressed_inputs())
    q, kv, x = leaves
    borders = BORDERS if documents else (0, SEQLEN)
    parts = [entries_of(x[:, start:stop]) for start, stop in pairwise(borders)]
    row = torch.arange(SEQLEN)[:, None]
    seen = (row.T <= row) & (row.T > row - WINDOW)
    columns = torch.zeros(SEQLEN, 0, dtype=torch.bool)
    for (start, stop), part in zip(pairwise(borders), parts, strict=True):
        seen[start:stop, :start] = False
        ends = start + RATIO * torch.arange(1, part.shape[1] + 1)
        columns = torch.cat((columns, (row >= start) & (row < stop) & (ends <= row + 1)), 1)
    keys = torch.cat((kv, *parts), 1).unsqueeze(2)
    mask = torch.cat((seen, columns), 1)[None, None].to(DEVICE)
    out = torchs_attention(q, keys, keys, mask, sinks)
    return [out.detach(), *torch.autograd.grad(out, [*leaves, sinks], dout)]


def all_that_rows_see(entries: Entries) -> Tensor:
    columns = torch.arange(int(entries.count.max()))
    seen = columns < entries.count[:, None]
    return torch.where(seen, entries.first[:, None] + columns, -1)[None].to(DEVICE)


def compressed_on_ranks(
    comm: Communicator, dtype: torch.dtype, documents: bool, chosen: bool
) -> list[Tensor]:
    """The same; `chosen`: entries are given one by one."""
    sp = SequenceParallel(DRAW({"sequence_parallel_size": comm.size}), comm)
    *whole, dout, sinks = (x.to(dtype) for x in compressed_inputs())
    leaves, sinks = [sp.shard(x).requires_grad_() for x in whole], sinks.requires_grad_()
    q, kv, x = leaves
    attention, borders = CompressedAttention(sp), BORDERS if documents else None
    with torch.autograd.set_multithreading_enabled(False):
        entries = attention.compress(x, RATIO, pool, REACH, borders)
        seen = all_that_rows_see(entries) if chosen else None
        options: dict[str, Any] = {"ratio": RATIO, "sinks": sinks, "cu_seqlens": borders}
        out = attention(q, kv, entries.values, seen, WINDOW, **options)
        *grads, dsinks = torch.autograd.grad(out, [*leaves, sinks], sp.shard(dout))
    return [*(sp.unshard(x).detach() for x in (out, *grads)), sp.sum_over_ranks(dsinks)]


def errors_of(results: list[Tensor], expected: list[Tensor]) -> list[float]:
    pairs = zip(results, expected, strict=True)
    return [float((x.double() - y).norm() / y.norm()) for x, y in pairs]


def assert_as_exact_as_torch(
    what: str, names: tuple[str, ...], by_torch: Any, on_ranks: Any, size: int, dtype: torch.dtype
) -> None:
    """Print the errors of several ranks and, in brackets, of torch's attention; compare them."""
    expected = by_torch(torch.float64)
    errors = errors_of(run_threads(size, on_ranks, dtype)[0], expected)
    of_torch = errors_of(by_torch(dtype), expected)
    parts = (f"{n} {a:.2e} ({b:.2e})" for n, a, b in zip(names, errors, of_torch, strict=True))
    print(f"\n{what}, {size} ranks, {dtype}: {', '.join(parts)}", flush=True)
    bounds = [BOUNDS.get(dtype, MAX_ERROR_RATIO * error) for error in of_torch[:-1]]
    bounds += [BOUNDS.get(dtype, GPU_TOLERANCES[torch.bfloat16])]  # few numbers, which say little
    assert all(error <= bound for error, bound in zip(errors, bounds, strict=True))


@pytest.mark.parametrize("per_head", [False, True], ids=["one choice", "a choice of each head"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_to_chosen_keys_is_as_exact_as_torchs_under_a_mask(
    dtype: torch.dtype, per_head: bool
) -> None:
    def on_ranks(comm: Communicator, dtype: torch.dtype) -> list[Tensor]:
        return sparse_on_ranks(comm, dtype, per_head)

    by_torch = partial(sparse_by_torch, per_head=per_head)
    assert_as_exact_as_torch("chosen keys", NAMES[0], by_torch, on_ranks, 4, dtype)


@pytest.mark.parametrize("chosen", [False, True], ids=["all entries", "chosen entries"])
@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_to_windows_and_entries_is_as_exact_as_torchs_under_a_mask(
    dtype: torch.dtype, documents: bool, chosen: bool
) -> None:
    def on_ranks(comm: Communicator, dtype: torch.dtype) -> list[Tensor]:
        return compressed_on_ranks(comm, dtype, documents, chosen)

    by_torch = partial(compressed_by_torch, documents=documents)
    what = f"windows and {'chosen ' * chosen}entries{' of documents' * documents}"
    assert_as_exact_as_torch(what, NAMES[1], by_torch, on_ranks, 4, dtype)


def waits_of(run: Any) -> int:
    """How often the host waits for the GPU in a warm call and its backward."""
    run()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(x.message) for x in caught)


@pytest.mark.parametrize("kind", ["chosen keys", "all entries", "chosen entries"])
def test_waits_for_the_gpu_do_not_grow_with_the_blocks(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy from the host for each block of rows would end the overlap of host and GPU."""
    comm, dtype = World(1).comm(0), torch.bfloat16
    run = partial(sparse_on_ranks, comm, dtype, True)
    if kind != "chosen keys":
        run = partial(compressed_on_ranks, comm, dtype, False, kind == "chosen entries")
    if DEVICE == "cpu":
        run()
        return
    waits = [waits_of(run)]
    monkeypatch.setattr(readers, "BLOCK_ELEMENTS", readers.BLOCK_ELEMENTS >> 10)
    monkeypatch.setattr(readers, "BLOCK_SCORES", readers.BLOCK_SCORES >> 10)
    waits.append(waits_of(run))
    print(f"\n{kind}: waits {waits[0]}, in smaller blocks {waits[1]}", flush=True)
    assert waits[0] == waits[1]


def test_latents_are_the_keys_and_values_that_they_project_to() -> None:
    """As in DeepSeek V3.2: keys and values are projections of latents."""
    shapes = (1, SEQLEN, HEADS, 48), (1, SEQLEN, 1, 16), (1, SEQLEN, 1, 64), (HEADS, 32 + 24, 64)
    inputs, chosen = drawn(*shapes)[:-1], choice(False)

    def rank(comm: Communicator) -> list[Tensor]:
        sp = SequenceParallel(DRAW({"sequence_parallel_size": comm.size}), comm)
        q, shared, latents = (sp.shard(x).requires_grad_() for x in inputs[:3])
        up, mine = inputs[3].clone().requires_grad_(), sp.shard(chosen)
        both = torch.einsum("bjc,hxc->bjhx", latents[:, :, 0], up)
        k = torch.cat((both[..., :32], shared.expand(-1, -1, HEADS, -1)), -1)
        leaves = [q, shared, latents, up]
        with torch.autograd.set_multithreading_enabled(False):
            outs = (
                SparseAttention(sp)(q, shared, latents, mine, kv_up=up),
                SparseAttention(sp)(q, k, both[..., 32:], mine),
            )
            grads = [torch.autograd.grad(x.sin().sum(), leaves) for x in outs]
        pairs = zip(outs, grads, strict=True)
        results = [(x.detach(), *dx, sp.sum_over_ranks(dup)) for x, (*dx, dup) in pairs]
        return [(x - y).norm() / y.norm() for x, y in zip(*results, strict=True)]

    for errors in run_threads(4, rank):
        assert largest(map(float, errors)) < 1e-10
