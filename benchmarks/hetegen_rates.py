"""The rates of a machine as HeteGen measures them, and beside what its lanes do, for a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import torch
from torch import Tensor

from wf_backends.hetegen import Rates

WEIGHTS = 6  # so many that caches do not hold them all
SECONDS = 0.5
Run = Callable[[int], object]


def print_rates(device: torch.device, rates: Rates, width: int) -> None:
    """As the plans take them, then more, with the lanes' copies beside."""
    print(f"measure_machine: {rates}\n")
    rows = [torch.randn(width, width).bfloat16() for _ in range(WEIGHTS)]
    print("| GB/s of weights, bfloat16 | alone | beside | what is beside |\n|---|---|---|---|")
    for tokens in (1, 8, 64):
        print(f"| the host, {tokens} tokens | {rate(gemm(rows, tokens), rows[0]):.1f} | | |")
    with ThreadPoolExecutor(1) as lane:
        in_thread = lane.submit(rate, gemm(rows, 1), rows[0]).result()
    print(f"| the host, 1 token, in a thread | {in_thread:.1f} | | |", flush=True)
    if device.type != "cuda":
        return
    there = [row.to(device) for row in rows]
    slab = torch.empty_like(there[0])
    pinned = [torch.empty(row.shape, dtype=row.dtype, pin_memory=True) for row in rows]
    sync = torch.cuda.synchronize
    for tokens in (1, 64):
        print(f"| the GPU, {tokens} tokens | {rate(gemm(there, tokens), rows[0], sync):.1f} | | |")
    copies: dict[str, tuple[Run, Callable[[], object]]] = {
        "pinned to the GPU": (lambda i: slab.copy_(pinned[i], non_blocking=True), sync),
        "pageable to the GPU": (lambda i: slab.copy_(rows[i]), sync),
        "pageable to pinned": (lambda i: pinned[i].copy_(rows[i]), nothing),
        "staged to the GPU": (
            lambda i: slab.copy_(pinned[i].copy_(rows[i]), non_blocking=True), sync,
        ),
    }  # fmt: skip
    for name, (run, wait) in copies.items():
        alone = rate(run, rows[0], wait)
        with ThreadPoolExecutor(1) as lane:
            host = lane.submit(rate, gemm(rows, 1), rows[0])
            copied = rate(run, rows[0], wait)
            beside = host.result()
        print(f"| {name} | {alone:.1f} | {copied:.1f} | the host's {beside:.1f} |", flush=True)


def nothing() -> None:
    pass


def gemm(rows: list[Tensor], tokens: int) -> Run:
    x = torch.randn(tokens, rows[0].shape[1]).to(rows[0])
    out = torch.empty(tokens, len(rows[0])).to(rows[0])
    return lambda i: torch.mm(x, rows[i].t(), out=out)


def rate(run: Run, row: Tensor, wait: Callable[[], object] = nothing) -> float:
    """GB/s: the median over turns through the weights, for some time."""
    took, end = list[float](), time.perf_counter() + SECONDS
    with torch.inference_mode():
        run(0)
        wait()
        while not took or time.perf_counter() < end:
            start = time.perf_counter()
            for i in range(WEIGHTS):
                run(i)
            wait()
            took.append((time.perf_counter() - start) / WEIGHTS)
    return row.nbytes / median(took) / 1e9
