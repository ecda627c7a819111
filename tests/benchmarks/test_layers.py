"""The baseline of the benchmarks is exact: Megatron's layer on ranks equals the layer alone."""

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
    layer = layers.Layer(24, 12).double()
    x = torch.randn(2, 13, 24, generator=torch.Generator().manual_seed(1)).double()
    x.requires_grad_()
    out = layer(x, attend)
    out.square().sum().backward()
    sizes = chunk_sizes(13, num_ranks)  # 13 rows: not a multiple of the ranks

    def run_rank(comm):
        counting = measure.Counting(comm)
        part = layers.cut_for_megatron(layer, comm.rank, num_ranks)
        rows = x.detach().split(sizes, 1)[comm.rank].clone().requires_grad_()
        out = part(rows, attend, *layers.megatron_moves(counting, sizes))
        out.square().sum().backward()
        return out, rows.grad, part.qkv.grad, counting.take()

    results = run_threads(num_ranks, run_rank)
    outs, dx, dqkv, counts = zip(*results, strict=True)
    assert (torch.cat(outs, 1) - out).abs().max() < 1e-10
    assert (torch.cat(dx, 1) - x.grad).abs().max() < 1e-10
    assert (torch.cat(dqkv, 1) - layer.qkv.grad).abs().max() < 1e-10
    if num_ranks > 1:
        assert all(posts == 8 for posts, _ in counts)
    bytes_of_x = 2 * 13 * 24 * 8
    assert sum(sent for _, sent in counts) == 8 * (num_ranks - 1) * bytes_of_x


def test_ranks_that_do_not_divide_the_heads_are_refused():
    with pytest.raises(ValueError, match="the 5 ranks must divide the 12 heads"):
        layers.cut_for_megatron(layers.Layer(24, 12), 0, 5)
