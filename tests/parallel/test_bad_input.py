"""Bad input: an error that names the cause, on every rank, instead of a hang or a wrong number."""

from __future__ import annotations

import json
import re
from threading import Event, Thread

import pytest
import torch

from tests.helpers import run_threads
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.cluster.presets import one_host
from wf_backends.comm import World


def alone(**words):
    return SequenceParallel(SequenceParallelConfig(**words), World(1).comm(0))


def qkv(seqlen=8, heads=4, kv_heads=2, dtype=torch.float32, head_dim=8):
    return [torch.randn(1, seqlen, n, head_dim, dtype=dtype) for n in (heads, kv_heads, kv_heads)]


def refused(change, says, error=ValueError, **options):
    tensors = qkv()
    with pytest.raises(error, match=says):
        alone().attention(*change(*tensors), **options)


def same(*tensors):
    return tensors


def test_ranks_with_different_topologies_are_told(tmp_path):
    def attend(comm):
        path = tmp_path / f"{comm.rank}.json"
        path.write_text(json.dumps(one_host(2).to_dict() | {"memory_gib": 1 + comm.rank}))
        words = {"sequence_parallel_size": 2, "topology": str(path)}
        sp = SequenceParallel(SequenceParallelConfig.from_dict(words), comm)
        sp.attention(*3 * [torch.zeros(1, 8, 2, 8)])

    with pytest.raises(ValueError, match=r"config its topology memory_gib: 1.0 \(ranks"):
        run_threads(2, attend)


def test_sequence_parallel_size_must_divide_the_world():
    config = SequenceParallelConfig(sequence_parallel_size=3)
    with pytest.raises(ValueError, match="must divide the 4 ranks of the group, got 3"):
        run_threads(4, lambda comm: SequenceParallel(config, comm))
    with pytest.raises(ValueError, match="1 ranks of the group, got 3: start 3 ranks"):
        SequenceParallel(config)


def test_tensors_that_do_not_fit_are_refused():
    refused(lambda q, k, v: (q.double(), k, v), "one dtype, got torch.float64, torch.float32")
    refused(lambda q, k, v: (q, k.to("meta"), v), "one device, got cpu, meta, cpu")
    refused(lambda q, k, v: (q[0], k, v), r"must be \(batch, seqlen, heads, head_dim\)")
    refused(lambda q, k, v: (q, k, v[:, :4]), r"k and v must have one batch size.*v \(1, 4, 2, 8\)")
    refused(lambda q, k, v: (q[..., :4], k, v), "head_dim")
    refused(lambda q, k, v: (q[:, :, :3], k, v), "kv heads must divide heads, got 2 and 3")
    refused(lambda q, k, v: (q.long(), k.long(), v.long()), "floating point dtype, got torch.int64")


def test_a_scale_that_is_learned_is_refused_not_left_without_its_gradient():
    scale = torch.tensor(0.5, requires_grad=True)
    refused(same, "softmax_scale must be a number.*requires a gradient", softmax_scale=scale)
    alone().attention(*qkv(), softmax_scale=scale.detach())


def test_a_scale_that_is_no_number_is_refused():
    for scale in (float("nan"), float("inf"), "0.5", True, [1], 1j, torch.ones(2)):
        refused(same, "softmax_scale must be a finite number or None", softmax_scale=scale)


def test_lengths_and_names_that_are_none_are_refused():
    for seqlen in ("8", 8.0, 0, -8, True):
        refused(same, "seqlen must be a positive integer, got", seqlen=seqlen)
    refused(same, r"seqlen must be the rows of q of all ranks, \[8\], together; got 9", seqlen=9)
    for name in (5, ["layer"]):
        refused(same, "name must be the name of a layer or None", name=name)


def test_dropout_that_is_no_probability_or_seed_is_refused():
    for p in (-0.1, 1.0, 1.5, float("nan"), "0.1", True, None):
        refused(same, r"dropout_p must be a number in \[0, 1\)", dropout_p=p)
    for seed in (-1, 1 << 63, 0.5, "7", True, torch.tensor(3)):
        says = r"dropout_seed must be an integer in \[0, 2\*\*63\)"
        for p in (0.0, 0.1):
            refused(same, says, dropout_p=p, dropout_seed=seed)


def test_sinks_slopes_and_caps_that_do_not_fit_are_refused():
    floats = torch.zeros(4)
    for name in ("sinks", "alibi_slopes"):
        for wrong in (floats[:3], floats[None], floats.long(), 0.5, [0.0] * 4):
            refused(same, f"{name} must be floats, one for each of the 4 heads", **{name: wrong})
        refused(
            same, f"{name} must be on the device of q, cpu, got meta", **{name: floats.to("meta")}
        )
    says = r"position_bias must be floats \(4 heads, 2 n - 1\)"
    for wrong in (floats, torch.zeros(4, 6), torch.zeros(3, 5), torch.zeros(4, 5).long(), 0.5):
        refused(same, says, position_bias=wrong)
    says = "position_bias must be on the device of q, cpu, got meta"
    refused(same, says, position_bias=torch.zeros(4, 5, device="meta"))
    learned = floats.clone().requires_grad_()
    refused(same, "alibi_slopes have no gradient: pass", alibi_slopes=learned)
    zero = {"alibi_slopes": torch.ones(4), "softmax_scale": 0.0}
    refused(same, "softmax_scale must not be 0 beside alibi_slopes", **zero)
    for cap in (-1.0, float("nan"), float("inf"), "30", True, None):
        refused(same, "softcap must be a number from 0", softcap=cap)
    error = NotImplementedError
    shorter = [x[:, :4] for x in qkv()[1:]]
    across = {"alibi_slopes": floats, "position_bias": torch.zeros(4, 5)}
    for name, value in across.items():
        says = "cross.*alibi_slopes and position_bias need"
        refused(lambda q, k, v: (q, *shorter), says, error, **{name: value})


class Wrapped(torch.Tensor):
    """A subclass, as frameworks have them for distributed or managed tensors."""


def test_tensor_subclasses_are_refused_not_given_zero_gradients():
    refused(lambda q, k, v: (q, k.as_subclass(Wrapped), v), "k must be a plain.*got a Wrapped")


def test_masks_that_do_not_fit_are_refused():
    refused(same, "end at the sequence length 8, got 6", cu_seqlens=[0, 3, 6])
    refused(same, "host integers", cu_seqlens=torch.tensor([0, 8]))
    refused(same, r"host integers, got \[0, 3.5, 8\]", cu_seqlens=[0, 3.5, 8])
    for causal in ("no", "False", 1, None, torch.tensor(True)):
        refused(same, "causal must be True or False, got", causal=causal)
        refused(same, "causal must be True or False, got", causal=causal, window_size=(2, 0))
    for window in ((-3, 0), (1, 2, 3), 3, None, (True, False)):
        refused(same, r"window_size must be \(left, right\)", window_size=window)

    def shorter(q, k, v):
        return q, k[:, :4], v[:, :4]

    refused(shorter, "cross attention.*8 queries, 4 keys", NotImplementedError, causal=True)


def test_a_sequence_too_short_is_refused():
    config = SequenceParallelConfig(sequence_parallel_size=4, layout="zigzag")

    def short(comm):
        SequenceParallel(config, comm).shard(torch.zeros(1, 7, 1, 8))

    with pytest.raises(ValueError, match="7 tokens is too short for the zigzag layout on 4 ranks"):
        run_threads(4, short)


@pytest.mark.parametrize(
    ("change", "says"),
    (
        ({"seqlen": 12}, r"q rows must be the shards.*got \[8, 8, 12\]"),
        ({"heads": 8}, r"heads: \[4, 4, 8\]"),
        ({"kv_heads": 4}, r"kv heads: \[2, 2, 4\]"),
        ({"head_dim": 16}, r"head_dim: \[8, 8, 16\]"),
        ({"dtype": torch.float64}, "dtype"),
    ),
)
def test_shapes_that_differ_between_ranks_are_named_by_rank(change, says):
    def attend(comm):
        sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=3, route="ring"), comm)
        sp.attention(*qkv(**(change if comm.rank == 2 else {})))

    with pytest.raises(ValueError, match=says):
        run_threads(3, attend)


@pytest.mark.parametrize("strategy", (None, "lss"))
@pytest.mark.parametrize("wrong", ("tensors", "mask", "dropout"))
def test_arguments_that_one_rank_refuses_are_waited_for_by_none(strategy, wrong):
    words = {"route": "all_gather", "strategy": strategy}

    def attend(comm):
        sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=3, **words), comm)
        q, k, v = qkv()
        bad = {
            "tensors": ((q, k, v[:, :4]), {}),
            "mask": ((q, k, v), {"cu_seqlens": [0, 9, 3]}),
            "dropout": ((q, k, v), {"dropout_p": 1.1}),
        }
        tensors, options = bad[wrong] if comm.rank == 1 else ((q, k, v), {})
        with pytest.raises((ValueError, NotImplementedError)) as refusal:
            sp.attention(*tensors, **options)
        sp.attention(q, k, v)  # and the group is as good as before
        return str(refusal.value)

    others, own, _ = told = run_threads(3, attend, timeout=20)
    assert others == told[2] == "the ranks do not agree: ranks [1] refuse their own arguments"
    assert {"tensors": "one batch size", "mask": "cu_seqlens", "dropout": "1.1"}[wrong] in own


def test_different_calls_on_different_ranks_are_named():
    def call(comm):
        sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=2), comm)
        sp.attention(*qkv()) if comm.rank else sp.unshard(qkv()[0])

    with pytest.raises(ValueError, match=r"a call that compares batch size, .* \(ranks \[1\]\)"):
        run_threads(2, call, timeout=20)


@pytest.mark.parametrize("call", ("attention", "shard_batch"))
def test_threads_that_use_one_sequence_parallel_at_the_same_time_are_refused(call):
    """Whoever comes second; the first goes on as if nothing had been."""
    refused = Event()

    def act(sp, told):
        try:
            if call == "attention":
                told.append(sp.attention(*qkv()).shape)
            else:
                told.append(sp.shard_batch({"input_ids": torch.ones(1, 8)})["input_ids"].shape)
        except RuntimeError as error:
            told.append(str(error))
            refused.set()

    def rank(comm):
        sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=2), comm)
        told = []
        both = [Thread(target=act, args=(sp, told)) for _ in range(2 - comm.rank)]
        assert comm.rank == 0 or refused.wait(10)
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        return told

    (error, first), (second,) = run_threads(2, rank, timeout=20)
    assert "call from one thread" in error and "new_group" in error
    assert first == second


def test_options_and_configs_that_differ_between_ranks_are_named():
    def attend(comm, differing):
        route = "ring" if comm.rank == 0 or differing != "config" else "all_gather"
        sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=2, route=route), comm)
        values = {"softcap": 3.0, "sinks": torch.zeros(4), "alibi_slopes": torch.zeros(4)}
        values |= {"position_bias": torch.zeros(4, 3)}
        values |= {"dropout_p": 0.1, "dropout_seed": 3}
        seeded = {"dropout_p": 0.1, "dropout_seed": 4} if differing == "dropout_seed" else {}
        mine = comm.rank == 0 and differing in values
        options = seeded | ({differing: values[differing]} if mine else {})
        sp.attention(*qkv(), causal=comm.rank == 0 and differing == "mask", **options)

    for differing in (
        "config",
        "mask",
        "softcap",
        "sinks",
        "alibi_slopes",
        "position_bias",
        "dropout_p",
        "dropout_seed",
    ):
        with pytest.raises(ValueError, match=f"the ranks do not agree.*{differing}"):
            run_threads(2, attend, differing)


def test_batches_that_differ_between_ranks_are_named():
    def prepare(comm):
        sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=2), comm)
        sp.shard_batch({"input_ids": torch.full((1, 8), comm.rank)})

    with pytest.raises(ValueError, match="the ranks do not agree.*input_ids"):
        run_threads(2, prepare)


def test_batches_with_different_keys_and_malformed_ones_are_named():
    def prepare(comm, second):
        sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=2), comm)
        ids = torch.zeros(1, 8, dtype=torch.int64)
        sp.shard_batch({"input_ids": ids} | (second if comm.rank else {}))

    with pytest.raises(ValueError, match=r"do not agree.*keys of the batch: \["):
        run_threads(2, prepare, {"labels": torch.zeros(1, 8, dtype=torch.int64)}, timeout=20)
    with pytest.raises(ValueError, match=r"ranks \[1\] refuse|labels must be a tensor \(1, 8\)"):
        run_threads(2, prepare, {"labels": torch.zeros(1, 7, dtype=torch.int64)}, timeout=20)


@pytest.mark.parametrize("act", ["shard", "unshard"])
def test_a_dim_that_the_tensor_lacks_is_named(act):
    with pytest.raises(
        ValueError, match=r"dim must be one of the 1 dimensions of a tensor \(8,\), got 1"
    ):
        getattr(alone(), act)(torch.zeros(8))


def test_a_batch_and_labels_that_are_none_are_refused():
    for batch in ([torch.zeros(1, 8)], None, torch.zeros(1, 8)):
        with pytest.raises(ValueError, match='a batch must be such as {"input_ids": ids}, got a'):
            alone().shard_batch(batch)
    for dtype in (torch.float32, torch.bool):
        with pytest.raises(ValueError, match=f"labels must be integers, got {dtype}"):
            alone().loss(torch.zeros(1, 8, 5), torch.zeros(1, 8, dtype=dtype))


@pytest.mark.parametrize("dim", ["1", 1.0, None])
def test_a_dim_that_is_no_number_is_refused(dim):
    for act in (alone().shard, alone().unshard):
        with pytest.raises(ValueError, match="dim must be one of the 2 dimensions"):
            act(torch.zeros(2, 8), dim)


@pytest.mark.parametrize("layout", ["zigzag", "document_zigzag"])
def test_documents_that_are_none_are_refused_where_a_tensor_is_cut(layout):
    """Under document_zigzag ranks would own rows twice, or none would."""
    sp, x = alone(layout=layout), torch.zeros(1, 8)
    acts = sp.shard, sp.unshard, lambda x, **words: sp.positions(8, **words)
    for borders in ([0, 5, 3, 8], [0, 4, 4, 8], [2, 8], [0, 8.5], torch.tensor([0, 8]), []):
        for act in acts:
            with pytest.raises(ValueError, match="cu_seqlens must be"):
                act(x, cu_seqlens=borders)


def test_a_tensor_that_is_no_shard_is_not_joined():
    def join(comm):
        sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=2), comm)
        sp.unshard(torch.zeros(1, 3 + 4 * comm.rank, 2))

    with pytest.raises(ValueError, match=r"must be the shards of the zigzag layout.*got \[3, 7\]"):
        run_threads(2, join)


def test_a_kernel_asked_for_by_name_and_not_there_is_refused():
    sp = alone(kernel="flash")
    with pytest.raises(ValueError, match="flash"):
        sp.attention(*qkv())


def test_nothing_to_attend_with_is_refused():
    refused(lambda q, k, v: (q[:, :, :0], k, v), r"positive, got q \(1, 8, 0, 8\)")
    refused(lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]), r"positive, .*k \(1, 8, 0, 8\)")
    refused(lambda q, k, v: (q[..., :0], k[..., :0], v[..., :0]), r"positive, got q \(1, 8, 4, 0\)")


def dual(attend, q):
    with torch.autograd.forward_ad.dual_level():
        return attend(torch.autograd.forward_ad.make_dual(q, q))


@pytest.mark.parametrize(
    "transform",
    (
        lambda attend, q: torch.vmap(attend)(q[None]),
        lambda attend, q: torch.func.grad(lambda q: attend(q).sum())(q),
        lambda attend, q: torch.func.jvp(attend, (q,), (q,)),
        lambda attend, q: torch.func.jacrev(attend)(q),
        dual,
    ),
)
def test_transforms_of_torch_are_refused_with_what_to_do(transform):
    sp, q = alone(), torch.randn(1, 8, 2, 8)
    says = r"sp.attention under torch.vmap.*q is inside.*batch dimension.*torch.autograd.grad"
    with pytest.raises(NotImplementedError, match=says):
        transform(lambda q: sp.attention(q, q, q), q)


class Attends(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.sp = alone()

    def forward(self, q):
        return self.sp.attention(q, q, q)


@pytest.mark.parametrize("strict", (False, True))
def test_export_is_refused_with_what_to_do(strict):
    says = r"torch.export of a model that calls sp.attention.*torch's own attention"
    with pytest.raises(Exception) as refusal:
        torch.export.export(Attends(), (torch.randn(1, 8, 2, 8),), strict=strict)
    causes = (refusal.value, refusal.value.__cause__, refusal.value.__context__)
    assert any(re.search(says, str(one)) for one in causes), causes
