"""What a rank's tiles take on the running job: the kernel's rates, and what each call costs beside.

Shapes: s rows of a tile, b batch, h heads, d head_dim; buffers are rows-first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from wf_backends.cost import BACKWARD_FLOPS
from wf_backends.executor import BackwardWork, ForwardWork
from wf_backends.kernels import Kernel, KernelSpec, select
from wf_backends.mask import FULL
from wf_backends.outputs import Outputs
from wf_backends.tiles import Tile
from wf_backends.topology import KernelRate

HEAD_DIM = 64
TILES, HEADS = (16, 1024), 4  # rows and keys of the two tiles that a kernel's rate is fitted to
GPU_TILES, GPU_HEADS = (1024, 8192), 8

Timed = Callable[[Callable[[], object]], float]  # seconds of some work, until all ranks are done


def kernel_rate(device: torch.device, seconds: Timed) -> tuple[str, KernelRate]:
    """The name and the rate of the kernel that "auto" takes: a line through two tiles' times.

    Of tiles as the executor runs them, merged into results that are there: on a CPU that is most
    of what short ones take.
    """
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    sizes, heads = (GPU_TILES, GPU_HEADS) if on_gpu else (TILES, HEADS)
    kernel = select("auto", KernelSpec(device.type, dtype, HEAD_DIM, heads, heads)).kernel
    flops = [4 * size * size * heads * HEAD_DIM for size in sizes]
    lines: list[tuple[float, float]] = []
    works = zip(*(tile_works(kernel, device, dtype, size, heads) for size in sizes), strict=True)
    for factor, (small, large) in zip((1.0, BACKWARD_FLOPS), works, strict=True):
        count = sizes[1] // sizes[0]  # in a row: it matters little that ranks do not start together
        first, second = seconds(partial(_repeat, small, count)) / count, seconds(large)
        rate = factor * (flops[1] - flops[0]) / max(second - first, second / 10)
        lines.append((rate, first - factor * flops[0] / rate))
    (forward, there), (backward, back) = lines
    return kernel.name, KernelRate(forward, backward, max(1e-7, (there + back) / 2))


def tile_works(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, size: int, heads: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """The (forward, backward) of a full tile of so many rows and keys, as the executor runs it."""
    source = torch.Generator(device).manual_seed(0)  # the program's own is left alone
    shape = (size, 1, heads, HEAD_DIM)
    q, k, v, dout = (
        torch.randn(shape, device=device, generator=source).to(dtype) for _ in range(4)
    )
    tile, kv, scale = Tile(((0, size),), ((0, size),), FULL), torch.stack((k, v), 1), HEAD_DIM**-0.5
    there = ForwardWork(kernel, scale, False, q)
    out, lse = there.stay.blank(size)
    there.compute(tile, (q,), (kv,), (out, lse), ())
    delta = (dout.to(lse.dtype) * out).sum(-1)
    queries = q, dout, torch.stack((lse, delta), dim=1)
    own = Outputs(dout, out.to(dtype), ((0, size),))
    back = BackwardWork(kernel, scale, False, queries, (kv,), own)
    grads = back.stay.blank(size), back.walk.blank(size)
    return (
        partial(there.compute, tile, (q,), (kv,), (out, lse), ()),
        partial(back.compute, tile, queries, (kv,), *grads),
    )


def _repeat(work: Callable[[], object], count: int) -> None:
    for _ in range(count):
        work()
