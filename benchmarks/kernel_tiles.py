"""Compare the sdpa kernel with torch's own attention on the same tiles, on one CPU or GPU.

    python benchmarks/kernel_tiles.py                 # all tiles, float32 and bfloat16
    python benchmarks/kernel_tiles.py --rows 4096 --threads 4
    python benchmarks/kernel_tiles.py --device cuda --rows 8192 --heads 32 --kv-heads 8

Each line is the best of several alternating runs, forward or backward, in milliseconds (on a CPU
of CPU time, all threads together).
`x` is ours / torch's; torch has no window, so there it gets a dense mask, as its users give it.
`x work` is ours / (torch's full tile * the share of scores that the band shows): 1.00 is a kernel
that computes only the visible scores, each as fast as torch does in a full tile. `reference` is our
kernel of einsums.
The last line of a dtype is the time of a merge of a tile's result into the running result. On a GPU
follow causal tiles with keys that all rows see, cut in two for cuDNN and in one call of flash, and
the reference kernel on a causal tile, by the number of BLOCK_SCORES that it computes at once.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from measure import cpu_name
from torch import Tensor

from wf_backends.kernels import Kernel, KernelSpec, Scores, TileGrad, merge, reference, select
from wf_backends.kernels.reference import ReferenceKernel, band_mask
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
    print(f"{'dtype':9} {'tile':32} {'':8} {'ours':>8} {'torch':>8} {'x':>6} {'x work':>7}", end="")
    print(f" {'reference':>9}")
    on_gpu = args.device == "cuda"
    for dtype in (torch.float32, torch.bfloat16):
        full: list[float] = []
        for band in bands(args.rows):
            try:
                ours, theirs, einsums = measure(args, dtype, band)
            except RuntimeError:  # such as out of memory; other tiles may fit
                traceback.print_exc()
                continue
            full = full or theirs
            show(args.device, args.rows, dtype, band, ours, theirs, einsums, full)
        merge_time = merge_ms(args, dtype)
        share = merge_time / full[0]
        print(f"{dtype}: a merge takes {merge_time:.3f} ms, {share:.3f} of torch's full forward")
        if on_gpu and dtype == torch.bfloat16:
            show_cut(args, dtype)
            show_blocks(args, dtype)


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


def measure(args: argparse.Namespace, dtype: torch.dtype, band: Band) -> Iterator[list[float]]:
    """[forward, backward] in ms: of ours, of torch's, and of the reference kernel."""
    spec = KernelSpec(args.device, dtype, args.head_dim, args.heads, args.kv_heads)
    kernels = [select(name, spec) for name in ("sdpa", "reference")]
    ours, einsums = (
        kernel_calls(kernel, args, dtype, band, args.rows, args.rows) for kernel in kernels
    )
    passes = zip(ours, torch_calls(args, dtype, band), einsums, strict=True)
    times = [best_of(calls, args.repeats, args.device) for calls in passes]
    return map(list, zip(*times, strict=True))


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


def show_blocks(args: argparse.Namespace, dtype: torch.dtype) -> None:
    """A line per size of the reference kernel's blocks: forward and backward in ms, MiB."""
    calls = kernel_calls(ReferenceKernel(), args, dtype, CAUSAL, args.rows, args.rows)
    print(f"{'blocks':>6} {'forward':>8} {'backward':>8} {'MiB':>6}")
    for reference.CUDA_BLOCKS in (1, 2, 4, 8, 16, 32):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        forward, backward = best_of(calls, args.repeats, args.device)
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        print(f"{reference.CUDA_BLOCKS:6} {forward:8.2f} {backward:8.2f} {peak:6.0f}", flush=True)


def torch_calls(args: argparse.Namespace, dtype: torch.dtype, band: Band) -> list[Callable]:
    """F.scaled_dot_product_attention and its backward by autograd."""
    q, dout = (rows_first(args, args.rows, args.heads, dtype).transpose(1, 2) for _ in range(2))
    k, v = (rows_first(args, args.rows, args.kv_heads, dtype).transpose(1, 2) for _ in range(2))
    options: dict[str, Any] = {"enable_gqa": True, "is_causal": band == CAUSAL}
    needs_mask = band not in (FULL, CAUSAL)
    if needs_mask:
        options["attn_mask"] = band_mask(args.rows, args.rows, band, torch.device(args.device))
    if args.device == "cuda" and (needs_mask or dtype == torch.float32):
        # Only the slowest backend there supports GQA with a mask, or in float32.
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
    clock = time.perf_counter if device == "cuda" else time.process_time
    for _ in range(repeats + 1):
        for index, call in enumerate(calls):
            start = clock()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            best[index] = min(best[index], 1e3 * (clock() - start))
    return best


def show(
    device: str,
    rows: int,
    dtype: torch.dtype,
    band: Band,
    ours: list[float],
    theirs: list[float],
    einsums: list[float],
    full: list[float],
) -> None:
    share = band_mask(rows, rows, band, torch.device(device)).float().mean().item()
    name = str(dtype).removeprefix("torch.")
    passes = zip(("forward", "backward"), ours, theirs, einsums, full, strict=True)
    for pass_name, our_ms, torch_ms, einsum_ms, full_ms in passes:
        figures = f"{our_ms:8.2f} {torch_ms:8.2f} {our_ms / torch_ms:6.2f}"
        x_work = our_ms / (full_ms * share)
        figures += f" {x_work:7.2f} {einsum_ms:9.2f}"
        print(f"{name:9} {str(band):32} {pass_name:8} {figures}", flush=True)


if __name__ == "__main__":
    main()
