"""What partial results that travel in bfloat16 cost in accuracy, beside others' sums.

Causal attention of bfloat16 tensors on ranks as threads; errors of out, dq, dk and dv against
float64 attention of the same tensors, root mean square relative to that of the right values.

- float32: `"partials": "float32"`, the default.
- activation: `"partials": "activation"`: summed in float32, rounded to bfloat16 for every message.
- ring-flash-attn: its sums, tile by tile in the order of its ring: tiles give bfloat16, gradients
  are added and travel in float32 (ring_flash_attn/ring_flash_attn.py).
- bfloat16 sums: the same, with dk and dv added up in bfloat16 on their way.

    python benchmarks/partials.py > benchmarks/results/partials.md
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterator

import torch
from measure import cpu_name
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
    random = torch.Generator().manual_seed(0)
    shape = (1, TOKENS, HEADS, HEAD_DIM)
    return [torch.randn(shape, generator=random).bfloat16() for _ in range(4)]


def right() -> list[Tensor]:
    """out and the gradients in float64, head by head."""
    parts = []
    for head in range(HEADS):
        q, k, v, dout = (x[:, :, head].double() for x in tensors())
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
        parts.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
    return [torch.stack(one, 2) for one in zip(*parts, strict=True)]


def ours(comm: Communicator, route: object, partials: str) -> list[Tensor]:
    """out and the gradients, whole, as bfloat16."""
    words = {"sequence_parallel_size": comm.size, "route": route, "partials": partials}
    sp = SequenceParallel(SequenceParallelConfig.from_dict(words), comm)
    *qkv, dout = (sp.shard(x) for x in tensors())
    leaves = [x.requires_grad_() for x in qkv]
    out = sp.attention(*leaves, causal=True)
    grads = torch.autograd.grad(out, leaves, dout)
    return [sp.unshard(x.detach()) for x in (out, *grads)]


def ring_flash_attn(ranks: int, sums: torch.dtype) -> list[Tensor]:
    """Its plain ring, all ranks in one process; dk and dv are added up in `sums`."""
    spec = KernelSpec("cpu", torch.bfloat16, HEAD_DIM, HEADS, HEADS)
    kernel = select("sdpa", spec)
    q, k, v, dout = (x.chunk(ranks, 1) for x in tensors())
    wide = [torch.zeros_like(x[0], dtype=torch.float32) for x in (q, k, v)]
    dq, dk, dv = ([x.clone() for _ in range(ranks)] for x in wide)
    outs = []
    for rank in range(ranks):
        out, lse = wide[0].clone(), torch.full(wide[0].shape[:3], -torch.inf)
        for origin in steps(rank, ranks):
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


def steps(rank: int, ranks: int) -> Iterator[int]:
    """Whose keys a rank holds, step by step; causal: none of later ranks."""
    return (rank - step for step in range(ranks) if step <= rank)


def errors(found: list[Tensor], wanted: list[Tensor]) -> str:
    """Relative root mean square errors, in thousandths."""
    pairs = zip(found, wanted, strict=True)
    return " | ".join(f"{1e3 * ((a.double() - b).norm() / b.norm()).item():.2f}" for a, b in pairs)


def route_words(name: str, ranks: int) -> object:
    side = round(ranks**0.5)
    words = {"mesh": {"rows": ranks // side, "cols": side}, "concentric": {"team_size": 2}}
    return {"name": name, **words.get(name, {})}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=(4, 16, 64))
    args = parser.parse_args()
    torch.set_num_threads(1)
    wanted = right()
    print("# Partial results in bfloat16\n\n`python benchmarks/partials.py`, errors in thousandths")
    print(f"of the right values' root mean square; {TOKENS} tokens, causal, {HEADS} heads of")
    print(
        f"{HEAD_DIM}; torch {torch.__version__}, Python {platform.python_version()}, {cpu_name()}\n"
    )
    print(f"| ranks | route | sums | {' | '.join(NAMES)} |\n|---|---|---|---|---|---|---|")
    for ranks in args.ranks:
        for name in ROUTES:
            for partials in ("float32", "activation"):
                route = route_words(name, ranks)
                found = run_threads(ranks, ours, route, partials, timeout=600)[0]
                print(f"| {ranks} | {name} | {partials} | {errors(found, wanted)} |", flush=True)
        for label, sums in (("ring-flash-attn", torch.float32), ("bfloat16", torch.bfloat16)):
            found = ring_flash_attn(ranks, sums)
            print(f"| {ranks} | its ring | {label} | {errors(found, wanted)} |", flush=True)


if __name__ == "__main__":
    main()
