"""ColossalAI on a machine without a GPU: for tests and for a demo.

ColossalAI 0.5.0 has a CPU accelerator, but ZeRO, Gemini, tensor and pipeline parallelism call
methods that only its CUDA accelerator implements. `cpu_accelerator()` implements them for the host
as the one device, registers them with ColossalAI, and undoes it at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from colossalai.accelerator import api
from colossalai.accelerator.cpu_accelerator import CpuAccelerator
from colossalai.kernel.kernel_loader import CPUAdamLoader
from colossalai.nn.optimizer import CPUAdam
from torch import Tensor

from wf_transformers.replace import set_until


class HostAccelerator(CpuAccelerator):
    """The host as the one device, called "cuda" because ZeRO asserts a device of that name."""

    def __init__(self) -> None:
        super().__init__()
        self._name = "cuda"

    def get_rng_state(self, device: Any = "cpu") -> Tensor:
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _nothing(*_: Any, **__: Any) -> Any:
        """There is one device, which computes in order, without streams and without a cache."""

    set_device = synchronize = empty_cache = Stream = current_stream = _nothing

    def stream(self, stream_: Any) -> Any:
        return nullcontext()


class _Adam:
    """ColossalAI's CPUAdamOptimizer, its compiled kernel, in torch operations."""

    def __init__(self, *settings: float) -> None:
        self._uses_adamw = bool(settings[-1])

    def step(
        self,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        bias_correction: bool,
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        div_scale: float = -1,
    ) -> None:
        """Do one step of Adam or AdamW in place; a div_scale above 0 divides the gradient."""
        grad = grad.to(param.dtype)
        if div_scale > 0:
            grad = grad / div_scale
        corrections = (1 - beta**step if bias_correction else 1.0 for beta in (beta1, beta2))
        tensors = (param, grad, exp_avg, exp_avg_sq)
        options = (lr, beta1, beta2, eps, weight_decay, *corrections, self._uses_adamw)
        CPUAdam.torch_adam_update(self, *tensors, *options)  # type: ignore[arg-type]


class _AdamExtension:
    """The extension that HybridAdam and Gemini load instead of a compiled kernel."""

    CPUAdamOptimizer = _Adam

    def is_available(self) -> bool:
        return True

    def assert_compatible(self) -> None:
        """Nothing to check: torch operations run everywhere."""

    def load(self) -> Any:
        return self


@contextmanager
def cpu_accelerator() -> Iterator[None]:
    """Inside, ColossalAI uses the host as its device.

    Give plugins `overlap_communication=False`: the host has no streams.

    Raises:
        RuntimeError: if there is a GPU.
    """
    if torch.cuda.is_available():
        raise RuntimeError("cpu_accelerator() is for machines without a GPU; leave it out")
    with ExitStack() as undo:
        set_until(undo, api, "_ACCELERATOR", HostAccelerator())
        extension: Any = _AdamExtension  # not a subclass, but it has all that a loader calls
        CPUAdamLoader.register_extension(extension)
        undo.callback(CPUAdamLoader.REGISTRY.remove, extension)
        # ColossalAI calls these three functions directly, not through its accelerator. If NCCL or
        # HCCL is available, its pipeline reads torch's Backend.HCCL, which torch 2.13 lacks
        set_until(undo, dist, "is_hccl_available", lambda: False)
        set_until(undo, c10d, "is_nccl_available", lambda: False)
        set_until(undo, torch.cuda, "set_device", lambda device: None)
        yield
