"""Compare the sdpa kernel with torch's own attention on the same tiles, on one CPU or GPU.

    python benchmarks/kernel_tiles.py                 # all tiles, float32 and bfloat16
    python benchmarks/kernel_tiles.py --rows 4096 --threads 4
    python benchmarks/kernel_tiles.py --device cuda --rows 8192 --heads 32 --kv-heads 8

Each line is the best of several alternating runs, forward or backward, in milliseconds.
`x` is ours / torch's; torch has no window, so there it gets a dense mask, as its users give it.
`x work` is ours / (torch's full tile * the share of scores that the band shows): 1.00 is a kernel
that computes only the visible scores, each as fast as torch does in a full tile.
The last line of a dtype is the time of a merge of a tile's result into the running result. On a GPU
follow causal tiles with keys that all rows see: cut in two for cuDNN, beside one call of flash.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from measure import cpu_name
from torch import Tensor

from wf_backends.kernels import Kernel, KernelSpec, Scores, TileGrad, merge, select
from wf_backends.kernels.reference import band_mask
from wf_backends.kernels.sdpa import SdpaKernel
from wf_backends.kernels.sdpa_cuda import CUDNN, FLASH
from wf_backends.schedule.mask import CAUSAL, FULL, Band

SHIFTED = [(1024, 1024), (1024, 7168), (2048, 2048), (2048, 14336), (4096, 4096), (8192, 8192)]
SHIFTED += [(8192, 57344)]  # rows, keys that all rows see


def main() -> None:
    """Print the machine, then one line per dtype and tile."""
    args = parse()
    torch.set_num_threads(args.threads)
    print(machine(args.device))
    print(f"rows = keys = {args.rows}, heads {args.heads}, kv_heads {args.kv_heads}, ", end="")
    print(f"head_dim {args.head_dim}, batch 1, threads {args.threads}")
    print(f"{'dtype':9} {'tile':32} {'':8} {'ours':>8} {'torch':>8} {'x':>6} {'x work':>7}")
    on_gpu = args.device == "cuda"
    for dtype in (torch.bfloat16,) if on_gpu else (torch.float32, torch.bfloat16):
        full: list[float] = []
        for band in bands(args.rows):
            try:
                ours, theirs = measure(args, dtype, band)
            except RuntimeError:  # such as out of memory; other tiles may fit
                traceback.print_exc()
                continue
            full = full or theirs
            show(args.device, args.rows, dtype, band, ours, theirs, full)
        merge_time = merge_ms(args, dtype)
        share = merge_time / full[0]
        print(f"{dtype}: a merge takes {merge_time:.3f} ms, {share:.3f} of torch's full forward")
        if on_gpu:
            show_cut(args, dtype)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


def machine(device: str) -> str:
    """torch's version and the name of the GPU or CPU."""
    if device == "cuda":
        cudnn = torch.backends.cudnn.version()
        return f"torch {torch.__version__}, cuDNN {cudnn}, {torch.cuda.get_device_name()}"
    return f"torch {torch.__version__}, {cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"


def bands(rows: int) -> list[Band]:
    """FULL first: the others are compared with it."""
    half = rows // 2
    shifted = [CAUSAL, Band(right=half), Band(left=0), Band(left=half)]
    return [FULL, *shifted, Band(half, 0), Band(rows // 8, 0), Band(64, 0), Band(128, 128)]


def measure(
    args: argparse.Namespace, dtype: torch.dtype, band: Band
) -> tuple[list[float], list[float]]:
    """[forward, backward] in ms, of ours and of torch's."""
    ours: list[float] = []
    theirs: list[float] = []
    spec = KernelSpec(args.device, dtype, args.head_dim, args.heads, args.kv_heads)
    our_calls = kernel_calls(select("sdpa", spec), args, dtype, band, args.rows, args.rows)
    calls = zip(our_calls, torch_calls(args, dtype, band), strict=True)
    for our_call, torch_call in calls:
        our_ms, torch_ms = best_of((our_call, torch_call), args.repeats, args.device)
        ours.append(our_ms)
        theirs.append(torch_ms)
    return ours, theirs


def rows_first(args: argparse.Namespace, rows: int, heads: int, dtype: torch.dtype) -> Tensor:
    """(1, rows, heads, head_dim) seen from a rows-first buffer, as the runtime's are."""
    buffer = torch.randn(rows, 1, heads, args.head_dim)
    return buffer.to(args.device, dtype).permute(1, 0, 2, 3)


def kernel_calls(
    kernel: Kernel, args: argparse.Namespace, dtype: torch.dtype, band: Band, rows: int, keys: int
) -> list[Callable]:
    """The forward and the backward call of a kernel, as the runtime makes them."""
    scores = Scores(args.head_dim**-0.5)
    q, dout = (rows_first(args, rows, args.heads, dtype) for _ in range(2))
    k, v = (rows_first(args, keys, args.kv_heads, dtype) for _ in range(2))
    out, lse = kernel.forward(q, k, v, scores, band)
    delta = (dout * out).sum(-1).transpose(1, 2)
    tile = TileGrad(dout, q, k, v, out.to(dtype), lse, delta)
    backward = partial(kernel.backward, tile, scores, band)
    return [partial(kernel.forward, q, k, v, scores, band), backward]


def show_cut(args: argparse.Namespace, dtype: torch.dtype) -> None:
    """A line per shifted causal tile: milliseconds cut in two for cuDNN, and in one flash call."""
    kernels = [SdpaKernel(lambda *_, chosen=chosen: chosen) for chosen in (CUDNN, FLASH)]
    print(f"{'rows':>6} {'keys':>7} {'':8} {'cut':>8} {'flash':>8} {'x':>6}")
    for rows, shift in SHIFTED:
        keys, band = rows + shift, Band(right=shift)
        both = [kernel_calls(kernel, args, dtype, band, rows, keys) for kernel in kernels]
        for name, calls in zip(("forward", "backward"), zip(*both, strict=True), strict=True):
            cut, flash = best_of(calls, args.repeats, args.device)
            print(f"{rows:6} {keys:7} {name:8} {cut:8.2f} {flash:8.2f} {cut / flash:6.2f}")


def torch_calls(args: argparse.Namespace, dtype: torch.dtype, band: Band) -> list[Callable]:
    """F.scaled_dot_product_attention and its backward by autograd."""
    q, dout = (rows_first(args, args.rows, args.heads, dtype).transpose(1, 2) for _ in range(2))
    k, v = (rows_first(args, args.rows, args.kv_heads, dtype).transpose(1, 2) for _ in range(2))
    options: dict[str, Any] = {"enable_gqa": True, "is_causal": band == CAUSAL}
    if band not in (FULL, CAUSAL):
        options["attn_mask"] = band_mask(args.rows, args.rows, band, torch.device(args.device))
        if args.device == "cuda":  # with a mask, only the slowest backend there supports GQA
            options["enable_gqa"] = False
            k, v = (x.repeat_interleave(args.heads // args.kv_heads, 1) for x in (k, v))
    forward = partial(F.scaled_dot_product_attention, q, k, v, **options)
    q_leaf, k_leaf, v_leaf = (x.detach().requires_grad_() for x in (q, k, v))
    out = F.scaled_dot_product_attention(q_leaf, k_leaf, v_leaf, **options)
    inputs = (q_leaf, k_leaf, v_leaf)
    return [forward, partial(torch.autograd.grad, out, inputs, dout, retain_graph=True)]


def merge_ms(args: argparse.Namespace, dtype: torch.dtype) -> float:
    """Best time in ms of a merge of one tile's (out, lse) into the running result."""
    q = rows_first(args, args.rows, args.heads, dtype)
    block_out, out = q.transpose(0, 1), q.transpose(0, 1).float()
    lse = torch.zeros(out.shape[:-1], device=out.device)
    return best_of([partial(merge, out, lse, block_out, lse + 1)], args.repeats, args.device)[0]


def best_of(calls: Sequence[Callable], repeats: int, device: str) -> list[float]:
    """The best time of each call in ms; calls take turns, as the machine's load varies."""
    best = [float("inf")] * len(calls)
    for _ in range(repeats + 1):
        for index, call in enumerate(calls):
            start = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            best[index] = min(best[index], 1e3 * (time.perf_counter() - start))
    return best


def show(
    device: str,
    rows: int,
    dtype: torch.dtype,
    band: Band,
    ours: list[float],
    theirs: list[float],
    full: list[float],
) -> None:
    share = band_mask(rows, rows, band, torch.device(device)).float().mean().item()
    name = str(dtype).removeprefix("torch.")
    passes = zip(("forward", "backward"), ours, theirs, full, strict=True)
    for pass_name, our_ms, torch_ms, full_ms in passes:
        figures = f"{our_ms:8.2f} {torch_ms:8.2f} {our_ms / torch_ms:6.2f}"
        x_work = our_ms / (full_ms * share)
        print(f"{name:9} {str(band):32} {pass_name:8} {figures} {x_work:7.2f}", flush=True)


if __name__ == "__main__":
    main()
