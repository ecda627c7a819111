"""What one call starts on a GPU: how many kernels, how long they run, and which take the time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

ATTENTION = ("flash", "fmha", "sdpa", "cudnn", "attention")
"""Words in the names of kernels that compute tiles."""
WIDTH = 90  # of a kernel's name in the table


def launches(run: Callable[[], object], top: int = 8) -> str:
    """A table of the kernels that `run` starts, after two runs that are not looked at.

    Without a GPU it is the operators of torch that are counted.
    """
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    for _ in range(2):
        run()
    with profile(activities=activities) as found:
        run()
        if on_gpu:
            torch.cuda.synchronize()
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    rows = [x for x in found.key_averages() if x.device_type == wanted and not is_span(x)]
    total = sum(map(microseconds, rows)) or 1.0
    tiles = sum(microseconds(x) for x in rows if any(w in x.key.lower() for w in ATTENTION))
    head = (
        f"{sum(x.count for x in rows)} {'kernels' if on_gpu else 'operators'}, "
        f"{total / 1e3:.3f} ms in them, {tiles / total:.1%} of it in tiles of attention"
    )
    largest = sorted(rows, key=microseconds, reverse=True)[:top]
    return "\n".join([head, *(line(x, microseconds(x) / total) for x in largest)])


def line(row: Any, share: float) -> str:
    """One kind of kernel: how often, how long, which share of all, which."""
    return f"  {row.count:6} in {microseconds(row) / 1e3:9.3f} ms {share:6.1%}  {row.key[:WIDTH]}"


def is_span(row: Any) -> bool:
    """Whether it is a span that a program named, which covers the kernels inside it."""
    return bool(getattr(row, "is_user_annotation", False)) or row.key.startswith("wallfacer ")


def microseconds(row: Any) -> float:
    """Time of its own, on the GPU where it ran there."""
    on_gpu = row.device_type == DeviceType.CUDA
    return float(row.self_device_time_total if on_gpu else row.self_cpu_time_total)
