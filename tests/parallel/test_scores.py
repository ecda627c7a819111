"""sp.attention with its options, on drawn configurations, beside dense attention in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dense import dense_attention
from tests.helpers import run_threads
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.kernels import Dropout
from wf_backends.lowering import tiles as lowering_tiles
from wf_backends.schedule import divisors
from wf_backends.schedule.mask import make_mask

SEQLEN, HEADS, KV_HEADS, HEAD_DIM, SEED = 50, 8, 4, 8, 11


def tensors(value_dim: int = HEAD_DIM) -> list[torch.Tensor]:
    """q, k, v and dout of the whole sequence, sinks, slopes, and a bias of 9 distances a side."""
    random = torch.Generator().manual_seed(0)
    widths = ((HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, value_dim), (HEADS, value_dim))
    shapes = [(2, SEQLEN, *width) for width in widths] + [(HEADS,), (HEADS,), (HEADS, 19)]
    return [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]


def attend(comm, config, mask, options):
    """out, dq, dk and dv of all rows, and this rank's parts of dsinks and dbias."""
    sp = SequenceParallel(SequenceParallelConfig.from_dict(config), comm)
    *qkv, dout, sinks, slopes, bias = tensors(options.get("value_dim", HEAD_DIM))
    q, k, v, sinks, bias = (x.requires_grad_() for x in (*qkv, sinks, bias))
    local = [sp.shard(x) for x in (q, k, v)]
    p = options.get("dropout_p", 0.0)
    arguments = common_arguments(options, sinks, slopes, bias)
    arguments |= {"dropout_p": p, "dropout_seed": SEED if p else None}
    out = sp.attention(*local, **mask, **arguments)
    grads = torch.autograd.grad(out, [*local, sinks, bias], sp.shard(dout), allow_unused=True)
    return [sp.unshard(x).detach() for x in (out, *grads[:3])], grads[3:]


def common_arguments(options, sinks, slopes, bias) -> dict[str, Any]:
    """Keyword arguments of both sp.attention and dense_attention."""
    return {
        "softcap": options.get("softcap", 0.0),
        "sinks": sinks if options.get("sinks") else None,
        "alibi_slopes": slopes.abs() / 10 if options.get("alibi_slopes") else None,
        "position_bias": bias if options.get("position_bias") else None,
    }


def dense(mask, options):
    """out, dq, dk, dv; dsinks and dbias, or None."""
    *qkv, dout, sinks, slopes, bias = tensors(options.get("value_dim", HEAD_DIM))
    q, k, v, sinks, bias = (x.requires_grad_() for x in (*qkv, sinks, bias))
    p = options.get("dropout_p", 0.0)
    arguments = common_arguments(options, sinks, slopes, bias)
    arguments |= {"dropout": Dropout(p, SEED, (0, HEADS)) if p else None}
    out = dense_attention(q, k, v, make_mask(**mask), HEAD_DIM**-0.5, **arguments)
    grads = torch.autograd.grad(out, [q, k, v, sinks, bias], dout, allow_unused=True)
    return [out, *grads[:3]], grads[3:]


def check(config, mask, options):
    """Every rank has the dense out, dq, dk, dv; the ranks' parts of dsinks and dbias add up."""
    results = run_threads(config["sequence_parallel_size"], attend, config, mask, options)
    gathered, sums = dense(mask, options)
    for tensors_of_rank, _ in results:
        for actual, expected in zip(tensors_of_rank, gathered, strict=True):
            assert (actual - expected).abs().max() < 1e-10
    parts_by_option = zip(*(parts for _, parts in results), strict=True)
    for name, parts, expected in zip(
        ("sinks", "position_bias"), parts_by_option, sums, strict=True
    ):
        if options.get(name):
            assert (sum(parts) - expected).abs().max() < 1e-10


def routes(num_ranks: int) -> list[dict[str, Any]]:
    """Every named route of so many ranks."""
    inner = [d for d in divisors(num_ranks) if 1 < d < num_ranks]
    return [
        {"name": "ring"},
        {"name": "all_gather"},
        *({"name": "double_ring", "inner": d} for d in inner),
        *({"name": "mesh", "rows": num_ranks // d, "cols": d} for d in inner),
        *({"name": "concentric", "team_size": d} for d in inner if num_ranks % d**2 == 0),
    ]


@st.composite
def configs(draw):
    """Size, layout, routes, and how heads are traded; or strategy "lss"."""
    size = draw(st.sampled_from((1, 2, 3, 4, 6, 8)))
    layout = draw(st.sampled_from(("zigzag", "contiguous")))
    config = {"sequence_parallel_size": size, "layout": layout}
    if size > 1 and draw(st.integers(0, 5)) == 0:
        return config | {"strategy": "lss"}
    degree = draw(st.sampled_from([d for d in divisors(size) if HEADS % d == 0]))
    route = st.sampled_from(routes(size // degree))
    config |= {"route": draw(route), "backward_route": draw(route), "ulysses_degree": degree}
    config["backward_moves"] = draw(st.sampled_from(("keys", "queries")))
    if degree > 1:
        config["ulysses_stride"] = draw(st.sampled_from(divisors(size // degree)))
        config["ulysses_chunks"] = draw(st.sampled_from(divisors(max(1, KV_HEADS // degree))))
    return config


MASKS = st.sampled_from(
    (
        {},
        {"causal": True},
        {"window_size": (5, 2)},
        {"causal": True, "window_size": (9, 9), "cu_seqlens": [0, 7, 30, SEQLEN]},
    )
)


@st.composite
def drawn_options(draw):
    return {
        "softcap": draw(st.sampled_from((0.0, 0.6))),
        "sinks": draw(st.booleans()),
        "alibi_slopes": draw(st.booleans()),
        "position_bias": draw(st.booleans()),
        "value_dim": draw(st.sampled_from((3, 8, 12))),
        "dropout_p": draw(st.sampled_from((0.0, 0.25))),
    }


@settings(max_examples=40)
@given(configs(), MASKS, drawn_options())
def test_drawn_options_under_drawn_configurations_are_exact(config, mask, options):
    check(config, mask, options)


ALL = {
    "dropout_p": 0.2,
    "value_dim": 5,
    "softcap": 0.6,
    "sinks": True,
    "alibi_slopes": True,
    "position_bias": True,
}


@pytest.mark.parametrize("size", (2, 3, 4, 8))
def test_lss_with_all_options_is_exact(size):
    check({"sequence_parallel_size": size, "strategy": "lss"}, {"causal": True}, ALL)


@pytest.mark.parametrize("chunks", (1, 2))
@pytest.mark.parametrize("stride", (1, 2))
def test_trading_heads_with_all_options_is_exact(stride, chunks):
    config = {"sequence_parallel_size": 4, "route": "ring", "ulysses_degree": 2}
    config |= {"ulysses_stride": stride, "ulysses_chunks": chunks}
    check(config, {"causal": True}, ALL)


def test_trading_heads_with_more_ranks_than_key_heads_is_exact():
    config = {"sequence_parallel_size": 8, "route": "ring", "ulysses_degree": 8}
    check(config, {"causal": True}, ALL)


def test_dropout_at_positions_of_the_shard_fails_the_check(monkeypatch):
    """In place of positions of the sequence, by which ranks draw the same dropout mask."""
    monkeypatch.setattr(lowering_tiles, "globalize", lambda local, held: local)
    config = {"sequence_parallel_size": 4, "route": "ring"}
    with pytest.raises(AssertionError):
        check(config, {"causal": True}, {"dropout_p": 0.3})


def bytes_sent(comm, config, dtype, value_dim):
    """Bytes that this rank sends, by label, in a forward and a backward.

    64 tokens, 8 heads, 4 key heads, head_dim 16.
    """
    sp = SequenceParallel(SequenceParallelConfig.from_dict(config), comm)
    shapes = [(1, 64, n, d) for n, d in ((8, 16), (4, 16), (4, value_dim))]
    qkv = [sp.shard(torch.randn(shape).to(dtype)).requires_grad_() for shape in shapes]
    sp.report()
    out = sp.attention(*qkv)
    out.backward(torch.ones_like(out))
    assert [x.grad.shape for x in qkv] == [x.shape for x in qkv] and out.dtype == dtype
    return sp.report()


CONTIGUOUS = {"sequence_parallel_size": 4, "route": "ring", "layout": "contiguous"}
ROWS, FLOAT64 = 16, 8  # of a rank; bytes


def test_a_ring_sends_narrow_values_without_padding():
    hop = ROWS * 4 * (16 + 8) * FLOAT64
    for sent in run_threads(4, bytes_sent, CONTIGUOUS, torch.float64, 8):
        hops = {label: size for label, size in sent.items() if "forward step" in label}
        assert hops == {f"forward step {step}": hop for step in range(3)}


def test_ulysses_exchanges_narrow_values_without_padding():
    ulysses = CONTIGUOUS | {"ulysses_degree": 4}
    per_width = 3 * ROWS // 4 * FLOAT64  # three of the four quarters of the heads leave a rank
    qkv = per_width * (8 * 16 + 4 * (16 + 8))
    for sent in run_threads(4, bytes_sent, ulysses, torch.float64, 8):
        assert sent["forward ulysses qkv"] == sent["backward ulysses qkv"] == qkv
        assert sent["forward ulysses out"] == sent["backward ulysses out"] == per_width * 8 * 8


def test_partials_in_bfloat16_are_half_the_bytes():
    wide = run_threads(4, bytes_sent, CONTIGUOUS, torch.bfloat16, 16)
    narrow_config = CONTIGUOUS | {"partials": "activation"}
    narrow = run_threads(4, bytes_sent, narrow_config, torch.bfloat16, 16)
    gradients = 3 * ROWS * 4 * 32  # elements of dk and dv that a rank sends
    for wide_sent, narrow_sent in zip(wide, narrow, strict=True):
        assert sum(wide_sent.values()) - sum(narrow_sent.values()) == 2 * gradients


def test_partials_are_refused_unless_float32_or_activation():
    with pytest.raises(ValueError, match=r"partials must be one of \['float32', 'activation'\]"):
        SequenceParallelConfig.from_dict({"partials": "bfloat16"})
