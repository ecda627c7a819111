"""The baseline of the benchmarks is a right one: Megatron's layer equals the whole layer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import ROOT, run_threads
from wf_backends.dsp import chunk_sizes

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "benchmarks")
    import layers
    import measure


def attend(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


@pytest.mark.parametrize("num_ranks", (1, 2, 3, 4, 6))
def test_megatron_layer_is_exact_with_eight_collectives(num_ranks):
    whole = layers.Layer(24, 12).double()
    x = torch.randn(2, 13, 24, generator=torch.Generator().manual_seed(1)).double()
    x.requires_grad_()
    out = whole(x, attend)
    out.square().sum().backward()
    sizes = chunk_sizes(13, num_ranks)

    def one_rank(comm):
        counting = measure.Counting(comm)
        part = layers.cut_for_megatron(whole, comm.rank, num_ranks)
        rows = x.detach().split(sizes, 1)[comm.rank].clone().requires_grad_()
        mine = part(rows, attend, *layers.megatron_moves(counting, sizes))
        mine.square().sum().backward()
        return mine, rows.grad, part.qkv.grad, counting.take()

    results = run_threads(num_ranks, one_rank)
    for index, wanted in enumerate((out, x.grad)):
        found = torch.cat([result[index] for result in results], 1)
        assert (found - wanted).abs().max() < 1e-10
    grads = torch.cat([grad for _, _, grad, _ in results], 1)
    assert (grads - whole.qkv.grad).abs().max() < 1e-10
    unit = 2 * 13 * 24 * 8
    assert sum(sent for *_, (_, sent) in results) == 8 * (num_ranks - 1) * unit
    assert num_ranks == 1 or all(posts == 8 for *_, (posts, _) in results)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="the 5 ranks must divide the 12 heads"):
        layers.cut_for_megatron(layers.Layer(24, 12), 0, 5)
