"""Attention over latents (`kv_up`): exact beside dense attention of the keys and values they give.

k = (latents kv_up[:, :n]^T, shared part) and v = latents kv_up[:, n:]^T, n being HEAD_WIDTH.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from tests.dense import dense_attention
from tests.helpers import run_threads
from tests.parallel.test_scores import HEADS, MASKS, SEQLEN, configs
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.schedule.mask import make_mask

HEAD_WIDTH, SHARED_WIDTH, LATENT_WIDTH, VALUE_WIDTH = 6, 4, 10, 5
BATCH = 2


def tensors():
    """q, the part of the keys that all heads share, latents, kv_up, dout, sinks."""
    random = torch.Generator().manual_seed(0)
    shapes = (
        (BATCH, SEQLEN, HEADS, HEAD_WIDTH + SHARED_WIDTH),
        (BATCH, SEQLEN, 1, SHARED_WIDTH),
        (BATCH, SEQLEN, 1, LATENT_WIDTH),
        (HEADS, HEAD_WIDTH + VALUE_WIDTH, LATENT_WIDTH),
        (BATCH, SEQLEN, HEADS, VALUE_WIDTH),
        (HEADS,),
    )
    return [torch.randn(shape, generator=random, dtype=torch.float64) / 2 for shape in shapes]


def attend(comm, config, mask, options):
    """A rank's results.

    Returns:
        out and the gradients of q, the shared part and the latents, gathered; this rank's parts of
        the gradients of kv_up and of the sinks; its bytes sent by label.
    """
    sp = SequenceParallel(SequenceParallelConfig.from_dict(config), comm)
    q, shared, latents, kv_up, dout, sinks = tensors()
    local = [sp.shard(x).requires_grad_() for x in (q, shared, latents)]
    kv_up, sinks = kv_up.requires_grad_(), sinks.requires_grad_()
    sp.report()
    out = sp.attention(*local, kv_up=kv_up, sinks=sinks, **mask, **options)
    *grads, d_kv_up, dsinks = torch.autograd.grad(out, [*local, kv_up, sinks], sp.shard(dout))
    sent = sp.report()
    return [sp.unshard(x).detach() for x in (out, *grads)], (d_kv_up, dsinks), sent


def dense(mask, options):
    """(out and the gradients of q, the shared part and the latents), those of kv_up and sinks."""
    *inputs, dout, sinks = (x.requires_grad_() for x in tensors())
    q, shared, latents, kv_up = inputs
    keys_and_values = torch.einsum("bjc,hxc->bjhx", latents[:, :, 0], kv_up)
    keys_of_heads, v = keys_and_values.split((HEAD_WIDTH, VALUE_WIDTH), dim=-1)
    k = torch.cat((keys_of_heads, shared.expand(-1, -1, HEADS, -1)), -1)
    scale = (HEAD_WIDTH + SHARED_WIDTH) ** -0.5
    out = dense_attention(q, k, v, make_mask(**mask), scale, sinks, **options)
    *grads, d_kv_up, dsinks = torch.autograd.grad(out, [*inputs, sinks], dout)
    return (out, *grads), (d_kv_up, dsinks)


def check(config, mask, options):
    """All ranks have the dense results, their parts add up to the dense gradients; bytes sent."""
    results = run_threads(config["sequence_parallel_size"], attend, config, mask, options)
    gathered, sums = dense(mask, options)
    for tensors_of_rank, _, _ in results:
        for actual, expected in zip(tensors_of_rank, gathered, strict=True):
            assert (actual - expected).abs().max() < 1e-10
    parts_by_tensor = zip(*(parts for _, parts, _ in results), strict=True)
    for parts, expected in zip(parts_by_tensor, sums, strict=True):
        assert (sum(parts) - expected).abs().max() < 1e-10
    return [sent for _, _, sent in results]


@settings(max_examples=20)
@given(configs().filter(lambda config: config.get("ulysses_chunks", 1) == 1), MASKS)
def test_drawn_configurations_are_exact(config, mask):
    check(config, mask, {"softcap": 2.0})


@pytest.mark.parametrize("size", (2, 3, 4, 8))
def test_lss_is_exact(size):
    check({"sequence_parallel_size": size, "strategy": "lss"}, {"causal": True}, {})


@pytest.mark.parametrize("degree", (2, 4, 8))
def test_trading_heads_for_tokens_is_exact(degree):
    config = {"sequence_parallel_size": 8, "route": "ring", "ulysses_degree": degree}
    check(config, {"causal": True}, {})


def test_the_planners_choice_is_exact():
    check({"sequence_parallel_size": 4}, {"causal": True}, {})


def test_a_ring_sends_latents_and_the_shared_part_of_the_keys_alone():
    config = {"sequence_parallel_size": 4, "route": "ring", "layout": "contiguous"}
    token = BATCH * (SHARED_WIDTH + LATENT_WIDTH) * 8  # bytes in float64
    rows = [(rank + 1) * SEQLEN // 4 - rank * SEQLEN // 4 for rank in range(4)]
    for rank, sent in enumerate(check(config, {}, {})):
        assert sent["forward step 0"] == rows[rank] * token
        hops = [size for label, size in sent.items() if label.startswith("forward step")]
        next_rank = (rank + 1) % 4  # its own rows are the only ones that it is not sent
        assert sum(hops) == token * (SEQLEN - rows[next_rank])


def attend_alone(*tensors, **options):
    return SequenceParallel(SequenceParallelConfig()).attention(*tensors, **options)


def test_one_latent_of_one_token_gives_its_values():
    """einsum lays this product out with the samples fastest, which torch's CPU kernel misreads."""
    q, shared, latents = torch.randn(2, 1, 3, 2), torch.randn(2, 1, 1, 1), torch.randn(2, 1, 1, 1)
    kv_up = torch.randn(3, 1 + 2, 1)
    sp = SequenceParallel(SequenceParallelConfig(layout="contiguous"))
    out = sp.attention(q, shared, latents, kv_up=kv_up)
    assert torch.allclose(out, latents * kv_up[:, 1:, 0])


@pytest.mark.parametrize(
    "change",
    (
        lambda kv_up: kv_up[0],
        lambda kv_up: 3,
        lambda kv_up: kv_up[:2],
        lambda kv_up: kv_up[:, :HEAD_WIDTH],
        lambda kv_up: kv_up[..., :3],
    ),
    ids=("2 dims", "number", "2 heads", "no values", "3 latents"),
)
def test_kv_up_of_another_shape_is_refused(change):
    q, shared, latents, kv_up, *_ = tensors()
    with pytest.raises(ValueError, match="kv_up must be"):
        attend_alone(q, shared, latents, kv_up=change(kv_up))


def test_kv_up_of_another_dtype_is_refused():
    q, shared, latents, kv_up, *_ = tensors()
    with pytest.raises(ValueError, match="kv_up must have q's dtype"):
        attend_alone(q, shared, latents, kv_up=kv_up.float())


def test_latents_of_several_heads_are_refused():
    q, shared, latents, kv_up, *_ = tensors()
    two_heads = [x.expand(-1, -1, 2, -1) for x in (shared, latents)]
    with pytest.raises(ValueError, match=r"beside kv_up k and v must be \(batch, length, 1"):
        attend_alone(q, *two_heads, kv_up=kv_up)


def test_chunks_of_heads_are_refused_by_name():
    """Latents have one head."""
    config = {"sequence_parallel_size": 2, "route": "ring", "ulysses_degree": 2}
    with pytest.raises(ValueError, match="ulysses_chunks must divide"):
        run_threads(2, attend, config | {"ulysses_chunks": 2}, {}, {})
