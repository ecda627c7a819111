"""LSS Transformer: exact in float64, two collectives a layer, bytes as derived, gradient means."""

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


def lss(size, group, layout="zigzag"):
    words = {"sequence_parallel_size": size, "strategy": "lss", "layout": layout}
    return SequenceParallel(SequenceParallelConfig.from_dict(words), group)


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
    *qkv, dout = draw(dtype)
    qkv = [x.requires_grad_() for x in qkv]
    local = [sp.shard(x) for x in qkv]
    out = sp.attention(*local, **mask)
    grads = torch.autograd.grad(out, local, sp.shard(dout))
    sent, posts = sp.report(), counting.posts
    wide = [x.detach().double().requires_grad_() for x in qkv]
    dense = dense_attention(*wide, make_mask(**mask), 8**-0.5)
    right = [dense, *torch.autograd.grad(dense, wide, dout.double())]
    pairs = zip((out, *grads), right, strict=True)
    return largest((a - sp.shard(b)).abs().max().item() for a, b in pairs), posts, sent


@pytest.mark.parametrize("num_ranks", SIZES)
@pytest.mark.parametrize("layout", ("zigzag", "contiguous"))
def test_exact_with_two_collectives_a_layer(num_ranks, layout):
    for mask in MASKS:
        for error, posts, _ in run_threads(num_ranks, attend, layout, mask):
            assert error < 1e-10
            if num_ranks == 1:
                continue
            collectives = {"forward gather": 1, "backward home": 1}
            assert posts == collectives or (mask and posts.items() <= collectives.items())


@pytest.mark.parametrize("num_ranks", (2, 3, 4, 6, 8))
def test_a_full_mask_sends_two_times_p_minus_one_shards_each_way(num_ranks):
    for rank, (_, _, sent) in enumerate(run_threads(num_ranks, attend, "contiguous", {})):
        rows = (rank + 1) * SEQLEN // num_ranks - rank * SEQLEN // num_ranks
        row = 2 * 2 * 2 * 8 * 8  # K and V, batch, key heads, head_dim, float64
        forward, backward = (num_ranks - 1) * rows * row, (SEQLEN - rows) * row
        assert sent == {"forward gather": forward, "backward home": backward}


def test_keys_that_no_query_of_a_rank_sees_are_not_sent_to_it():
    full, causal = (
        sum(
            sent.get("forward gather", 0) for *_, sent in run_threads(4, attend, "contiguous", mask)
        )
        for mask in ({}, {"causal": True})
    )
    assert causal < 0.55 * full


def test_bfloat16_is_as_good_as_its_dtype():
    for error, _, _ in run_threads(4, attend, "zigzag", {"causal": True}, torch.bfloat16):
        assert error < 0.1


class Net(nn.Module):
    """A layer of attention over bytes, learned positions; dropout is none."""

    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(16, 12), nn.Embedding(64, 12)
        self.qkv, self.head = nn.Linear(12, 36), nn.Linear(12, 16)
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, sp, batch):
        x = self.embed(batch["input_ids"]) + self.place(batch["position_ids"])
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 6)).unbind(2)
        return self.head(x + sp.attention(q, k, v, causal=True).flatten(2))


def one_batch(sequence):
    """Few valid labels, all at the end: some ranks have none."""
    random = torch.Generator().manual_seed(sequence)
    ids = torch.randint(0, 16, (1, 29), generator=random)
    labels = ids.masked_fill(torch.arange(29) < 11 + 9 * sequence, -100)
    return {"input_ids": ids, "labels": labels}


def train(comm, size, steps=3, how="fused"):
    """Losses and parameters after plain SGD on comm.size / size sequences at a time."""
    sp = lss(size, comm)
    net = filled(Net().double())
    replica = comm.rank // size
    data = comm.view(range(comm.rank % size, comm.size, size)) if how == "two" else None
    average = DoubleAverage(sp, comm, data)
    losses = []
    for _ in range(steps):
        batch = sp.shard_batch(one_batch(replica))
        loss = sp.loss(net(sp, batch), batch["labels"])
        net.zero_grad()
        loss.backward()
        average(net.parameters())
        losses.append(sp.sum_over_ranks(loss).item())
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.5 * p.grad
    return losses, nn.utils.parameters_to_vector(net.parameters()).detach()


def filled(net):
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=random, dtype=p.dtype) * 0.3)
    return net


@pytest.mark.parametrize("size", SIZES)
def test_training_equals_one_rank(size):
    ((losses, right),) = run_threads(1, train, 1)
    for found, parameters in run_threads(size, train, size):
        assert found == pytest.approx(losses, abs=1e-12)
        assert (parameters - right).abs().max() < 1e-10


@pytest.mark.parametrize(("size", "how"), [(2, "fused"), (2, "two"), (4, "two"), (3, "fused")])
def test_data_parallel_times_sequence_parallel_equals_data_parallel(size, how):
    alone = run_threads(2, train, 1)
    results = run_threads(2 * size, train, size, 3, how)
    for rank, (losses, parameters) in enumerate(results):
        assert losses == pytest.approx(alone[rank // size][0], abs=1e-12)
        assert (parameters - alone[0][1]).abs().max() < 1e-10


@pytest.mark.parametrize("bucket_bytes", (1, 100, 1 << 20))
@pytest.mark.parametrize("num_ranks", (1, 3, 4))
def test_gradient_mean_and_its_bytes(num_ranks, bucket_bytes):
    def one_rank(comm):
        shapes = ((5, 3), (1,), (7,))
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        parameters.append(nn.Parameter(torch.zeros(4, dtype=torch.bfloat16)))
        for i, p in enumerate(parameters):
            p.grad = None if (i, comm.rank) == (2, 0) else torch.full_like(p, comm.rank + i)
        frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        GradientMean(comm, bucket_bytes=bucket_bytes)([*parameters, frozen])
        return [p.grad for p in parameters], frozen.grad, sum(comm.sent.values())

    results = run_threads(num_ranks, one_rank)
    mean = (num_ranks - 1) / 2
    for grads, frozen, _ in results:
        wanted = [mean, mean + 1, mean + 2 - 2 / num_ranks, mean + 3]
        assert all(
            torch.allclose(g, torch.full_like(g, w)) for g, w in zip(grads, wanted, strict=True)
        )
        assert frozen is None
    assert sum(sent for *_, sent in results) == 2 * (num_ranks - 1) * (23 * 4 + 4 * 2)


def test_ranks_with_different_parameters_are_told():
    def one_rank(comm):
        GradientMean(comm)([nn.Parameter(torch.zeros(2 + comm.rank))])

    with pytest.raises(ValueError, match="their shapes and dtypes"):
        run_threads(2, one_rank)


def test_bad_input():
    with pytest.raises(ValueError, match="bucket_bytes must be at least 1, got 0"):
        GradientMean(bucket_bytes=0)
    with pytest.raises(ValueError, match="a multiple of the 2 ranks of a sequence, got 1"):
        run_threads(2, lambda comm: DoubleAverage(lss(2, comm), comm.view([comm.rank])))


@pytest.mark.parametrize(
    ("words", "says"),
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
def test_what_contradicts_the_strategy_is_refused_by_name(words, says):
    with pytest.raises(ValueError, match=says):
        SequenceParallelConfig.from_dict({"sequence_parallel_size": 4, "strategy": "lss", **words})


def test_the_strategy_names_the_all_gather_route():
    config = SequenceParallelConfig(sequence_parallel_size=4, strategy="lss")
    assert config.route == {"name": "all_gather"}
    assert SequenceParallelConfig.from_dict(config.to_dict()) == config
