"""strategy "lss": exact in float64, two collectives a layer, bytes as derived, gradient means."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.dense import dense_attention, largest
from tests.helpers import ROOT, run_threads
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.parallel.gradients import DoubleAverage, GradientMean
from wf_backends.schedule.mask import make_mask

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "benchmarks")
    from measure import Counting

SIZES = (1, 2, 3, 4, 6, 8)
SEQLEN = 37
MASKS = [
    {},
    {"causal": True},
    {"causal": True, "window_size": (7, -1)},
    {"window_size": (3, 5)},
    {"cu_seqlens": [0, 11, 12, SEQLEN]},
    {"causal": True, "cu_seqlens": [0, 3, 4, 20, SEQLEN]},
]


def lss(size, comm, layout="zigzag"):
    config = SequenceParallelConfig(sequence_parallel_size=size, strategy="lss", layout=layout)
    return SequenceParallel(config, comm)


def draw(dtype=torch.float64, heads=4, kv_heads=2, head_dim=8):
    random = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, SEQLEN, n, head_dim, generator=random, dtype=torch.float64).to(dtype)
        for n in (heads, kv_heads, kv_heads, heads)
    ]


def attend(comm, layout, mask, dtype=torch.float64):
    """The worst error of out, dq, dk, dv; posts and bytes by label."""
    counting = Counting(comm)
    sp = lss(comm.size, counting, layout)
    q, k, v, dout = draw(dtype)
    local = [sp.shard(x.requires_grad_()) for x in (q, k, v)]
    out = sp.attention(*local, **mask)
    actual = [out, *torch.autograd.grad(out, local, sp.shard(dout))]
    sent, posts = sp.report(), counting.posts
    float64 = [x.detach().double().requires_grad_() for x in (q, k, v)]
    dense = dense_attention(*float64, make_mask(**mask), 8**-0.5)
    expected = [dense, *torch.autograd.grad(dense, float64, dout.double())]
    errors = ((a - sp.shard(b)).abs().max().item() for a, b in zip(actual, expected, strict=True))
    return largest(errors), posts, sent


@pytest.mark.parametrize("num_ranks", SIZES)
@pytest.mark.parametrize("layout", ("zigzag", "contiguous"))
def test_exact_with_two_collectives_a_layer(num_ranks, layout):
    """Under a mask a rank may have nothing to gather or to reduce."""
    collectives = {"forward gather": 1, "backward reduce": 1} if num_ranks > 1 else {}
    for mask in MASKS:
        for error, posts, _ in run_threads(num_ranks, attend, layout, mask):
            assert error < 1e-10, mask
            assert posts == collectives or (mask and posts.items() <= collectives.items()), mask


@pytest.mark.parametrize("num_ranks", (2, 3, 4, 6, 8))
def test_full_mask_sends_all_keys_to_all_ranks_and_gradients_to_owners(num_ranks):
    row = 2 * 2 * 2 * 8 * 8  # bytes: k and v, batch, key heads, head_dim, float64
    for rank, (_, _, sent) in enumerate(run_threads(num_ranks, attend, "contiguous", {})):
        rows = (rank + 1) * SEQLEN // num_ranks - rank * SEQLEN // num_ranks
        forward, backward = (num_ranks - 1) * rows * row, (SEQLEN - rows) * row
        assert sent == {"forward gather": forward, "backward reduce": backward}


def bytes_gathered(mask):
    """By 4 ranks in the forward."""
    results = run_threads(4, attend, "contiguous", mask)
    return sum(sent.get("forward gather", 0) for _, _, sent in results)


def test_keys_that_no_query_of_a_rank_sees_are_not_sent_to_it():
    """A causal mask on contiguous shards of 37 tokens: a little more than half of the keys."""
    assert bytes_gathered({"causal": True}) < 0.55 * bytes_gathered({})


def test_bfloat16_errors_stay_below_a_tenth():
    """Elements reach 5 and are rounded to 2**-8. tests/runtime/test_exact.py compares better."""
    for error, _, _ in run_threads(4, attend, "zigzag", {"causal": True}, torch.bfloat16):
        assert error < 0.1


class LanguageModel(nn.Module):
    """One layer of attention over 16 tokens, with learned positions and a parameter unused."""

    def __init__(self):
        super().__init__()
        self.embed, self.embed_position = nn.Embedding(16, 12), nn.Embedding(64, 12)
        self.qkv, self.head = nn.Linear(12, 36), nn.Linear(12, 16)
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, sp, batch):
        x = self.embed(batch["input_ids"]) + self.embed_position(batch["position_ids"])
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 6)).unbind(2)
        return self.head(x + sp.attention(q, k, v, causal=True).flatten(2))


def batch_of(sequence):
    """29 tokens whose last 18 or 9 count in the loss: some ranks have no valid label."""
    random = torch.Generator().manual_seed(sequence)
    ids = torch.randint(0, 16, (1, 29), generator=random)
    labels = ids.masked_fill(torch.arange(29) < 11 + 9 * sequence, -100)
    return {"input_ids": ids, "labels": labels}


def train(comm, size, average="fused"):
    """Losses and parameters of three steps of SGD, a sequence for each `size` ranks.

    Args:
        average: "fused" = gradients are averaged over all ranks at once, "two" = over the ranks of
            a sequence, then over those with the same shard.
    """
    sp = lss(size, comm)
    model = with_random_weights(LanguageModel().double())
    replica = comm.rank // size
    replicas = comm.view(range(comm.rank % size, comm.size, size)) if average == "two" else None
    average_gradients = DoubleAverage(sp, comm, replicas)
    losses = []
    for _ in range(3):
        batch = sp.shard_batch(batch_of(replica))
        loss = sp.loss(model(sp, batch), batch["labels"])
        model.zero_grad()
        loss.backward()
        average_gradients(model.parameters())
        losses.append(sp.sum_over_ranks(loss).item())
        assert model.unused.grad is None  # as on one device: AdamW would decay it by zeros
        with torch.no_grad():
            for p in set(model.parameters()) - {model.unused}:
                p -= 0.5 * p.grad
    return losses, nn.utils.parameters_to_vector(model.parameters()).detach()


def with_random_weights(model):
    """Every thread draws the same: torch's own generator is shared between them."""
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=random, dtype=p.dtype) * 0.3)
    return model


@pytest.mark.parametrize("size", SIZES)
def test_training_equals_one_rank(size):
    ((expected_losses, expected_parameters),) = run_threads(1, train, 1)
    for losses, parameters in run_threads(size, train, size):
        assert losses == pytest.approx(expected_losses, abs=1e-12)
        assert (parameters - expected_parameters).abs().max() < 1e-10


@pytest.mark.parametrize(("size", "average"), [(2, "fused"), (2, "two"), (4, "two"), (3, "fused")])
def test_data_parallel_times_sequence_parallel_equals_data_parallel(size, average):
    data_parallel = run_threads(2, train, 1)
    _, expected_parameters = data_parallel[0]
    results = run_threads(2 * size, train, size, average)
    for rank, (losses, parameters) in enumerate(results):
        expected_losses, _ = data_parallel[rank // size]
        assert losses == pytest.approx(expected_losses, abs=1e-12)
        assert (parameters - expected_parameters).abs().max() < 1e-10


def test_parameters_of_two_dtypes_in_turn_share_two_buckets():
    """As in layers whose norms are in float32."""

    def posts(comm, num_layers):
        counting = Counting(comm)
        dtypes = (torch.bfloat16, torch.float32) * num_layers
        parameters = [nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in dtypes]
        for p in parameters:
            p.grad = torch.ones_like(p)
        GradientMean(counting)(parameters)
        return counting.posts

    assert run_threads(2, posts, 8) == run_threads(2, posts, 1)


def test_a_group_that_is_no_multiple_of_a_sequences_ranks_is_refused():
    with pytest.raises(ValueError, match="a multiple of the 2 ranks of a sequence, got 1"):
        run_threads(2, lambda comm: DoubleAverage(lss(2, comm), comm.view([comm.rank])))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "lsss"}, "strategy must be one of .*did you mean 'lss'"),
        ({"route": "ring"}, "route 'ring' contradicts strategy \"lss\""),
        ({"route": {"name": "mesh", "rows": 2, "cols": 2}}, "route .*mesh.* contradicts"),
        ({"backward_route": "ring"}, "backward_route 'ring' contradicts"),
        ({"backward_route": "auto"}, "backward_route 'auto' contradicts"),
        ({"backward_moves": "queries"}, "backward_moves 'queries' contradicts"),
        ({"ulysses_degree": 2}, "ulysses_degree 2 contradicts"),
    ],
)
def test_options_that_contradict_the_strategy_are_refused_by_name(options, message):
    lss = {"sequence_parallel_size": 4, "strategy": "lss"}
    with pytest.raises(ValueError, match=message):
        SequenceParallelConfig.from_dict(lss | options)


def test_the_strategy_takes_the_all_gather_route():
    config = SequenceParallelConfig(sequence_parallel_size=4, strategy="lss")
    assert config.route == {"name": "all_gather"}
    assert SequenceParallelConfig.from_dict(config.to_dict()) == config
