"""Errors of sending partial results in bfloat16, compared with other ways to sum them.

Causal attention of bfloat16 tensors; all ranks are threads. The errors of out, dq, dk and dv are
relative root mean square errors, compared with float64 attention of the same tensors.

- float32: `"partials": "float32"`, the default.
- activation: `"partials": "activation"`: summed in float32, rounded to bfloat16 for every message.
- ring-flash-attn: sums as in ring_flash_attn/ring_flash_attn.py, tile by tile in ring order: tiles
  return bfloat16; gradients are summed and sent in float32.
- bfloat16: the same, with dk and dv summed in bfloat16.

    python benchmarks/partials.py > benchmarks/results/partials.md
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterator

import torch
from measure import cpu_name, print_head, print_row
from torch import Tensor

from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import Communicator
from wf_backends.comm.threads import run_threads
from wf_backends.kernels import KernelSpec, Scores, TileGrad, merge, select
from wf_backends.schedule import CAUSAL, FULL

HEADS, HEAD_DIM, TOKENS = 2, 64, 4096
NAMES = ("out", "dq", "dk", "dv")
ROUTES = ("ring", "all_gather", "mesh", "concentric")
SCORES = Scores(HEAD_DIM**-0.5)


def tensors() -> list[Tensor]:
    """q, k, v and dout in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, TOKENS, HEADS, HEAD_DIM)
    return [torch.randn(shape, generator=generator).bfloat16() for _ in range(4)]


def reference() -> list[Tensor]:
    """out and the gradients in float64, computed head by head."""
    parts = []
    for head in range(HEADS):
        q, k, v, dout = (x[:, :, head].double() for x in tensors())
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
        parts.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
    return [torch.stack(heads, 2) for heads in zip(*parts, strict=True)]


def ours(comm: Communicator, route: object, partials: str) -> list[Tensor]:
    """out and the gradients of the whole sequence, in bfloat16."""
    options = {"sequence_parallel_size": comm.size, "route": route, "partials": partials}
    sp = SequenceParallel(SequenceParallelConfig.from_dict(options), comm)
    *qkv, dout = (sp.shard(x) for x in tensors())
    leaves = [x.requires_grad_() for x in qkv]
    out = sp.attention(*leaves, causal=True)
    grads = torch.autograd.grad(out, leaves, dout)
    return [sp.unshard(x.detach()) for x in (out, *grads)]


def ring_flash_attn(ranks: int, sums: torch.dtype) -> list[Tensor]:
    """The plain ring of ring-flash-attn in one process; dk and dv are summed in `sums`."""
    spec = KernelSpec("cpu", torch.bfloat16, HEAD_DIM, HEADS, HEADS)
    kernel = select("sdpa", spec)
    q, k, v, dout = (x.chunk(ranks, 1) for x in tensors())
    zeros = [torch.zeros_like(x[0], dtype=torch.float32) for x in (q, k, v)]
    dq, dk, dv = ([x.clone() for _ in range(ranks)] for x in zeros)
    outs = []
    for rank in range(ranks):
        out, lse = zeros[0].clone(), torch.full(zeros[0].shape[:3], -torch.inf)
        for origin in origins(rank, ranks):
            band = CAUSAL if origin == rank else FULL
            block, block_lse = kernel.forward(q[rank], k[origin], v[origin], SCORES, band)
            merge(out, lse, block, block_lse.transpose(1, 2))
        outs.append((out.bfloat16(), lse.transpose(1, 2).contiguous()))
    for step in range(ranks):
        for rank in range(step, ranks):
            origin, (out, lse) = rank - step, outs[rank]
            delta = (dout[rank].float() * out.float()).sum(-1).transpose(1, 2)
            tile = TileGrad(dout[rank], q[rank], k[origin], v[origin], out, lse, delta)
            grads = kernel.backward(tile, SCORES, FULL if step else CAUSAL)
            dq[rank] += grads[0]
            for total, grad in zip((dk, dv), grads[1:], strict=True):
                total[origin] = (total[origin].to(sums) + grad.to(sums)).float()
    whole = (torch.cat(parts, 1).bfloat16() for parts in (dq, dk, dv))
    return [torch.cat([out for out, _ in outs], 1), *whole]


def origins(rank: int, ranks: int) -> Iterator[int]:
    """The rank whose keys this rank holds, by step; under a causal mask, no later ranks."""
    return (rank - step for step in range(ranks) if step <= rank)


def errors(results: list[Tensor], expected: list[Tensor]) -> list[str]:
    """Relative root mean square errors, in thousandths."""
    pairs = zip(results, expected, strict=True)
    ratios = [((a.double() - b).norm() / b.norm()).item() for a, b in pairs]
    return [f"{1e3 * ratio:.2f}" for ratio in ratios]


def route_config(name: str, ranks: int) -> object:
    """The config of a route with this name."""
    side = round(ranks**0.5)
    options = {"mesh": {"rows": ranks // side, "cols": side}, "concentric": {"team_size": 2}}
    return {"name": name, **options.get(name, {})}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=(4, 16, 64))
    args = parser.parse_args()
    torch.set_num_threads(1)
    expected = reference()
    print("# Partial results in bfloat16\n\n`python benchmarks/partials.py`, errors in thousandths")
    print(f"of the right values' root mean square; {TOKENS} tokens, causal, {HEADS} heads of")
    print(
        f"{HEAD_DIM}; torch {torch.__version__}, Python {platform.python_version()}, {cpu_name()}\n"
    )
    print_head("ranks", "route", "sums", *NAMES)
    for ranks in args.ranks:
        for name in ROUTES:
            for partials in ("float32", "activation"):
                route = route_config(name, ranks)
                results = run_threads(ranks, ours, route, partials, timeout=600)[0]
                print_row(ranks, name, partials, *errors(results, expected))
        for label, sums in (("ring-flash-attn", torch.float32), ("bfloat16", torch.bfloat16)):
            results = ring_flash_attn(ranks, sums)
            print_row(ranks, "its ring", label, *errors(results, expected))


if __name__ == "__main__":
    main()
