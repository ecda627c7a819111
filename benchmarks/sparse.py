"""Compare attention to chosen keys with torch's attention under a mask of all keys, on one CPU.

    python benchmarks/sparse.py
    python benchmarks/sparse.py --seqlens 4096 8192 --chosen 512

transformers gives torch such a mask (rows x keys) for layers with an indexer. Both compute
multi-head latent attention in float32, forward and backward, from the same latents; torch gets the
keys and values of all heads. Each line is the median of alternating runs; x is ours / torch's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from measure import cpu_name
from torch import Tensor

from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm.threads import run_threads
from wf_backends.sparse import SparseAttention

HEADS, PER_HEAD, SHARED, LATENTS = 8, 64, 32, 128


def main() -> None:
    """Print the machine, then a line for each sequence length."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seqlens", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--chosen", type=int, default=256, help="keys that a row sees")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{cpu_name()}, torch {torch.__version__}, 1 thread, float32")
    print(
        f"{HEADS} heads, {PER_HEAD} + {SHARED} of keys, {LATENTS} latents, {args.chosen} keys a row"
    )
    print(f"{'tokens':>7} {'torch s':>8} {'ours s':>8} {'x':>5} {'error':>8}")
    for seqlen in args.seqlens:
        run_threads(1, compare, seqlen, args.chosen, args.runs, timeout=3600.0)


def compare(comm: object, seqlen: int, num_chosen: int, runs: int) -> None:
    """Time both, and print their times and the largest difference of their outputs."""
    sparse = SparseAttention(
        SequenceParallel(SequenceParallelConfig(sequence_parallel_size=1), comm)
    )
    torch.manual_seed(0)
    q = torch.randn(1, seqlen, HEADS, PER_HEAD + SHARED)
    shared, latents = torch.randn(1, seqlen, 1, SHARED), torch.randn(1, seqlen, 1, LATENTS)
    up = torch.randn(HEADS, 2 * PER_HEAD, LATENTS) * LATENTS**-0.5
    seen = torch.ones(seqlen, seqlen, dtype=torch.bool).tril()
    chosen = torch.rand(seqlen, seqlen).masked_fill(~seen, -1).topk(num_chosen).indices
    chosen = chosen.masked_fill(~seen.gather(-1, chosen), -1)[None, :, None]
    leaves = [x.requires_grad_() for x in (q, shared, latents, up)]

    def ours() -> Tensor:
        return sparse(q, shared, latents, chosen, kv_up=up)

    def of_torch() -> Tensor:
        index = chosen[:, :, 0].masked_fill(chosen[:, :, 0] < 0, seqlen)
        mask = torch.zeros(1, seqlen, seqlen + 1, dtype=torch.bool).scatter(-1, index, True)
        both = torch.einsum("bjc,hxc->bhjx", latents[:, :, 0], up)
        k = torch.cat((both[..., :PER_HEAD], shared.transpose(1, 2).expand(-1, HEADS, -1, -1)), -1)
        heads_first = q.transpose(1, 2), k, both[..., PER_HEAD:]
        out = F.scaled_dot_product_attention(*heads_first, attn_mask=mask[:, None, :, :-1])
        return out.transpose(1, 2)

    seconds: dict[Callable[[], Tensor], list[float]] = {of_torch: [], ours: []}
    for _ in range(runs):
        for attend, times in seconds.items():
            start = time.perf_counter()
            torch.autograd.grad(attend().sum(), leaves)
            times.append(time.perf_counter() - start)
    torch_s, ours_s = map(median, seconds.values())
    with torch.no_grad():
        error = float((ours() - of_torch()).abs().max())
    print(
        f"{seqlen:7} {torch_s:8.2f} {ours_s:8.2f} {ours_s / torch_s:5.2f} {error:8.1e}", flush=True
    )


if __name__ == "__main__":
    main()
