"""Options of sp.attention on configurations drawn at random, beside dense attention."""

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

SEQLEN, HEADS, KV_HEADS, SEED = 50, 8, 4, 11


def tensors(value_dim: int = 8) -> list[torch.Tensor]:
    """Whole q, k, v, dout, sinks, slopes, and a bias of 9 distances to either side."""
    random = torch.Generator().manual_seed(0)
    shapes = [(2, SEQLEN, n, d) for n, d in ((HEADS, 8), (KV_HEADS, 8), (KV_HEADS, value_dim))]
    shapes += [(2, SEQLEN, HEADS, value_dim), (HEADS,), (HEADS,), (HEADS, 19)]
    return [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]


def attend(comm, words, mask, options):
    """out, dq, dk and dv of this rank's rows, gathered, and its parts of dsinks and dbias."""
    sp = SequenceParallel(SequenceParallelConfig.from_dict(words), comm)
    *qkv, dout, sinks, slopes, bias = tensors(options.get("value_dim", 8))
    leaves = [x.requires_grad_() for x in (*qkv, sinks, bias)]
    local = [sp.shard(x) for x in leaves[:3]]
    given = told(options, sinks, slopes, bias) | dropped(options)
    out = sp.attention(*local, **mask, **given)
    grads = torch.autograd.grad(out, [*local, sinks, bias], sp.shard(dout), allow_unused=True)
    return [sp.unshard(x).detach() for x in (out, *grads[:3])], grads[3:]


def told(options, sinks, slopes, bias) -> dict[str, Any]:
    """Keyword arguments of sp.attention and of dense_attention."""
    return {
        "softcap": options.get("softcap", 0.0),
        "sinks": sinks if options.get("sinks") else None,
        "alibi_slopes": slopes.abs() / 10 if options.get("alibi_slopes") else None,
        "position_bias": bias if options.get("position_bias") else None,
    }


def dropped(options) -> dict[str, Any]:
    """Keyword arguments of sp.attention."""
    p = options.get("dropout_p", 0.0)
    return {"dropout_p": p, "dropout_seed": SEED if p else None}


def check(words, mask, options):
    """Every rank has what dense attention gives; the ranks' parts of dsinks, dbias add up."""
    found = run_threads(words["sequence_parallel_size"], attend, words, mask, options)
    *qkv, dout, sinks, slopes, bias = tensors(options.get("value_dim", 8))
    leaves = [x.requires_grad_() for x in (*qkv, sinks, bias)]
    p = options.get("dropout_p", 0.0)
    dropout = Dropout(p, SEED, (0, HEADS)) if p else None
    dense = dense_attention(
        *qkv, make_mask(**mask), 8**-0.5, **told(options, sinks, slopes, bias), dropout=dropout
    )
    right = [dense, *torch.autograd.grad(dense, leaves, dout, allow_unused=True)]
    for tensors_found, _ in found:
        for a, b in zip(tensors_found, right, strict=False):
            assert (a - b).abs().max() < 1e-10
    for i, name in enumerate(("sinks", "position_bias")):
        if options.get(name):
            total = torch.stack([parts[i] for _, parts in found]).sum(0)
            assert (total - right[4 + i]).abs().max() < 1e-10


def routes(part: int) -> list[dict[str, Any]]:
    """Every named route for so many ranks."""
    inner = [d for d in divisors(part) if 1 < d < part]
    found: list[dict[str, Any]] = [{"name": "ring"}, {"name": "all_gather"}]
    found += [{"name": "double_ring", "inner": d} for d in inner]
    found += [{"name": "mesh", "rows": part // d, "cols": d} for d in inner]
    return found + [{"name": "concentric", "team_size": d} for d in inner if part % d**2 == 0]


@st.composite
def configs(draw):
    """Size, routes, layout, and how heads are traded."""
    size = draw(st.sampled_from((1, 2, 3, 4, 6, 8)))
    layout = draw(st.sampled_from(("zigzag", "contiguous")))
    words = {"sequence_parallel_size": size, "layout": layout}
    if size > 1 and draw(st.integers(0, 5)) == 0:
        return words | {"strategy": "lss"}
    degree = draw(st.sampled_from([d for d in divisors(size) if HEADS % d == 0]))
    route = st.sampled_from(routes(size // degree))
    words |= {"route": draw(route), "backward_route": draw(route), "ulysses_degree": degree}
    words["backward_moves"] = draw(st.sampled_from(("keys", "queries")))
    if degree > 1:
        words["ulysses_stride"] = draw(st.sampled_from(divisors(size // degree)))
        words["ulysses_chunks"] = draw(st.sampled_from(divisors(max(1, KV_HEADS // degree))))
    return words


MASKS = st.sampled_from(
    (
        {},
        {"causal": True},
        {"window_size": (5, 2)},
        {"causal": True, "window_size": (9, 9), "cu_seqlens": [0, 7, 30, SEQLEN]},
    )
)


@st.composite
def options(draw):
    yes = st.booleans()
    softcap = draw(st.sampled_from((0.0, 0.6)))
    width = draw(st.sampled_from((3, 8, 12)))
    return {
        "softcap": softcap,
        "sinks": draw(yes),
        "alibi_slopes": draw(yes),
        "position_bias": draw(yes),
        "value_dim": width,
        "dropout_p": draw(st.sampled_from((0.0, 0.25))),
    }


@settings(max_examples=40)
@given(configs(), MASKS, options())
def test_drawn_options_under_drawn_configurations(words, mask, options):
    check(words, mask, options)


ALL = {"dropout_p": 0.2, "value_dim": 5, "softcap": 0.6, "sinks": True, "alibi_slopes": True}
ALL |= {"position_bias": True}


@pytest.mark.parametrize("size", (2, 3, 4, 8))
def test_lss(size):
    words = {"sequence_parallel_size": size, "strategy": "lss"}
    check(words, {"causal": True}, ALL)


@pytest.mark.parametrize("chunks", (1, 2))
@pytest.mark.parametrize("stride", (1, 2))
def test_heads_traded_for_tokens_in_chunks(stride, chunks):
    words = {"sequence_parallel_size": 4, "route": "ring", "ulysses_degree": 2}
    words |= {"ulysses_stride": stride, "ulysses_chunks": chunks}
    check(words, {"causal": True}, ALL)


def test_more_ranks_than_key_heads():
    words = {"sequence_parallel_size": 8, "route": "ring", "ulysses_degree": 8}
    check(words, {"causal": True}, ALL)


def test_a_fault_in_a_mask_that_ranks_draw_is_noticed(monkeypatch):
    """Positions of a rank's own rows in place of those of the sequence."""
    monkeypatch.setattr(lowering_tiles, "_globalize", lambda local, held: local)
    words = {"sequence_parallel_size": 4, "route": "ring"}
    with pytest.raises(AssertionError):
        check(words, {"causal": True}, {"dropout_p": 0.3})


def sent_by(comm, words, dtype, value_dim):
    """Bytes that this rank sent, by label, in a forward and a backward of 64 tokens."""
    sp = SequenceParallel(SequenceParallelConfig.from_dict(words), comm)
    shapes = [(1, 64, n, d) for n, d in ((8, 16), (4, 16), (4, value_dim))]
    qkv = [sp.shard(torch.randn(shape).to(dtype)).requires_grad_() for shape in shapes]
    sp.report()
    out = sp.attention(*qkv)
    out.backward(torch.ones_like(out))
    assert [x.grad.shape for x in qkv] == [x.shape for x in qkv] and out.dtype == dtype
    return sp.report()


def test_no_padding_of_values_is_sent():
    words = {"sequence_parallel_size": 4, "layout": "contiguous"}
    ring = words | {"route": "ring"}
    ulysses = ring | {"ulysses_degree": 4}
    rows, element = 16, 8  # of a rank; float64
    for sent in run_threads(4, sent_by, ring, torch.float64, 8):
        hop = rows * 4 * (16 + 8) * element
        assert {label: size for label, size in sent.items() if "forward step" in label} == {
            f"forward step {step}": hop for step in range(3)
        }
    for sent in run_threads(4, sent_by, ulysses, torch.float64, 8):
        three = 3 * rows // 4 * element  # quarters of a rank's heads
        assert sent["forward ulysses qkv"] == three * (8 * 16 + 4 * (16 + 8))
        assert sent["backward ulysses qkv"] == sent["forward ulysses qkv"]
        assert sent["forward ulysses out"] == sent["backward ulysses out"] == three * 8 * 8


def test_partials_in_the_dtype_of_the_activations_are_half_the_bytes():
    words = {"sequence_parallel_size": 4, "route": "ring", "layout": "contiguous"}
    wide = run_threads(4, sent_by, words, torch.bfloat16, 16)
    narrow = run_threads(4, sent_by, words | {"partials": "activation"}, torch.bfloat16, 16)
    gradients = 3 * 16 * 4 * 32  # elements of dK and dV that a rank sends
    for before, after in zip(wide, narrow, strict=True):
        assert sum(before.values()) - sum(after.values()) == 2 * gradients
    with pytest.raises(ValueError, match=r"partials must be one of \['float32', 'activation'\]"):
        SequenceParallelConfig.from_dict({"partials": "bfloat16"})
