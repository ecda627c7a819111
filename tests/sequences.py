"""What tests of SequenceParallel share: tensors, masks, slow links, attention beside dense."""

from __future__ import annotations

import torch

from tests.dense import dense_attention
from tests.helpers import run_threads
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.schedule.mask import make_mask
from wf_backends.schedule.slices import SLICE_WORDS

SEQLEN = 45
MASKS = (
    {},
    {"causal": True},
    {"window_size": (5, 2)},
    {"causal": True, "window_size": (9, 9), "cu_seqlens": [0, 7, 30, SEQLEN]},
)
SLOW = {
    "name": "two hosts",
    "hosts": 2,
    "ranks_per_host": 2,
    "nics_per_host": 1,
    "memory_gib": 16,
    "inside": {"latency_us": 20, "gigabits_per_s": 80},
    "between": {"latency_us": 50, "gigabits_per_s": 0.01},
    "kernels": {"sdpa": {"forward_tflops": 0.02, "backward_tflops": 0.04, "call_us": 50}},
}


def bytes_count(gigabits_per_s):
    """As SLOW without latencies, so that even tiny tensors are told apart by their bytes."""
    rates = {"forward_tflops": 0.02, "backward_tflops": 0.04, "call_us": 1e-3}
    inside = {"latency_us": 1e-3, "gigabits_per_s": 80}
    between = {"latency_us": 1e-3, "gigabits_per_s": gigabits_per_s}
    return SLOW | {"inside": inside, "between": between, "kernels": {"sdpa": rates}}


def tensors(heads, kv_heads, dtype=torch.float64, seqlen=SEQLEN):
    random = torch.Generator().manual_seed(0)
    shapes = [(2, seqlen, n, 8) for n in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(s, generator=random, dtype=torch.float64).to(dtype) for s in shapes]


def gradients(out, dout, q, k, v):
    """The output and the gradients of q, k and v."""
    return [out, *torch.autograd.grad((out * dout).sum(), (q, k, v))]


def attend(comm, words, heads, kv_heads, mask, wanted, topology=None):
    """Worst error of what `gradients` gives of whole tensors, through shard and unshard; and what
    was sent: "ulysses", "gather", "step", "home"."""
    sp = SequenceParallel(SequenceParallelConfig.from_dict(words), comm, topology)
    q, k, v, dout = tensors(heads, kv_heads)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    slices = {key: mask[key] for key in SLICE_WORDS if key in mask}
    parts = (sp.shard(x, **slices) for x in (q, k, v))
    out = sp.unshard(sp.attention(*parts, **mask), **slices)
    found = gradients(out, dout, q, k, v)
    worst = max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True))
    return worst, frozenset(label.split()[1] for label in sp.report() if "shard" not in label)


def run_attend(words, heads, kv_heads, mask, topology=None):
    """(worst error of any rank, what each sent), beside dense attention."""
    q, k, v, dout = tensors(heads, kv_heads)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    wanted = gradients(dense_attention(q, k, v, make_mask(**mask), 8**-0.5), dout, q, k, v)
    wanted = [x.detach() for x in wanted]
    size = words["sequence_parallel_size"]
    results = run_threads(size, attend, words, heads, kv_heads, mask, wanted, topology)
    return max(error for error, _ in results), [labels for _, labels in results]
