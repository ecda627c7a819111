"""What tests of SequenceParallel share: tensors, masks, a slow topology, errors against dense."""

from __future__ import annotations

import torch

from tests.dense import dense_attention, largest
from tests.helpers import run_threads
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.schedule.mask import make_mask
from wf_backends.schedule.slices import SLICE_ARGUMENTS

SEQLEN = 45  # not a multiple of 2, 4, 6 or 8 ranks
MASKS = (
    {},
    {"causal": True},
    {"window_size": (5, 2)},
    {"causal": True, "window_size": (9, 9), "cu_seqlens": [0, 7, 30, SEQLEN]},
)
SLOW_TOPOLOGY = {
    "name": "two hosts",
    "hosts": 2,
    "ranks_per_host": 2,
    "nics_per_host": 1,
    "memory_gib": 16,
    "inside": {"latency_us": 20, "gigabits_per_s": 80},
    "between": {"latency_us": 50, "gigabits_per_s": 0.01},
    "kernels": {"sdpa": {"forward_tflops": 0.02, "backward_tflops": 0.04, "call_us": 50}},
}


def without_latency(gigabits_per_s):
    """SLOW_TOPOLOGY with almost no latency: of small tensors, too, the bytes decide the time."""
    rates = {"forward_tflops": 0.02, "backward_tflops": 0.04, "call_us": 1e-3}
    inside = {"latency_us": 1e-3, "gigabits_per_s": 80}
    between = {"latency_us": 1e-3, "gigabits_per_s": gigabits_per_s}
    return SLOW_TOPOLOGY | {"inside": inside, "between": between, "kernels": {"sdpa": rates}}


def tensors(heads, kv_heads, dtype=torch.float64, seqlen=SEQLEN):
    """q, k, v and dout of the whole sequence: batch 2, head_dim 8, the same values at each call."""
    random = torch.Generator().manual_seed(0)
    shapes = [(2, seqlen, n, 8) for n in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(s, generator=random, dtype=torch.float64).to(dtype) for s in shapes]


def gradients(out, dout, q, k, v):
    """The output and the gradients of q, k and v."""
    return [out, *torch.autograd.grad((out * dout).sum(), (q, k, v))]


def attend(comm, config, heads, kv_heads, mask, expected, topology=None):
    """(largest error of out, dq, dk, dv on one rank, kinds of messages that it sent).

    The rank shards whole tensors and unshards the output. A kind of message is the second word of
    its label: "ulysses", "gather", "step", "reduce".
    """
    sp = SequenceParallel(SequenceParallelConfig.from_dict(config), comm, topology)
    q, k, v, dout = tensors(heads, kv_heads)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    slices = {key: mask[key] for key in SLICE_ARGUMENTS if key in mask}
    shards = (sp.shard(x, **slices) for x in (q, k, v))
    out = sp.unshard(sp.attention(*shards, **mask), **slices)
    actual = gradients(out, dout, q, k, v)
    error = largest((a - b).abs().max().item() for a, b in zip(actual, expected, strict=True))
    return error, frozenset(label.split()[1] for label in sp.report() if "shard" not in label)


def run_attend(config, heads, kv_heads, mask, topology=None):
    """(largest error of any rank against dense attention, kinds of messages of each rank)."""
    q, k, v, dout = tensors(heads, kv_heads)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    dense = gradients(dense_attention(q, k, v, make_mask(**mask), 8**-0.5), dout, q, k, v)
    expected = [x.detach() for x in dense]
    size = config["sequence_parallel_size"]
    results = run_threads(size, attend, config, heads, kv_heads, mask, expected, topology)
    return largest(error for error, _ in results), [kinds for _, kinds in results]
