"""ColossalAI on a CPU: for tests and for a demo, never on a GPU.

ColossalAI 0.5.0 knows a CPU accelerator, but ZeRO, Gemini, tensor and pipeline parallelism ask it
for what only CUDA has. `cpu_accelerator()` gives them answers that are true for one host device,
through ColossalAI's own hooks, and takes everything back at the end.
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

from wf_transformers import temporarily_replace


class HostAccelerator(CpuAccelerator):
    """The host as the one device, called "cuda" because ZeRO asserts a device of that name."""

    def __init__(self) -> None:
        super().__init__()
        self._name = "cuda"

    def get_rng_state(self, device: Any = "cpu") -> Tensor:
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_device(self, device: Any = None) -> None:
        """There is only one."""

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def synchronize(self, device: Any = None) -> None:
        """The host computes in order."""

    def empty_cache(self) -> None:
        """The host allocator keeps no cache of ours."""

    def Stream(self, device: Any = None, priority: int = 0, **_: Any) -> None:  # noqa: N802
        return None

    def current_stream(self, device: Any = None) -> None:
        return None

    def stream(self, stream_: Any) -> Any:
        return nullcontext()


class _Adam:
    """ColossalAI's CPUAdamOptimizer in torch operations."""

    def __init__(self, *settings: float) -> None:
        self._adamw = bool(settings[-1])

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
        """One step of Adam (AdamW if set), in place; gradients are divided by div_scale if > 0."""
        grad = grad.to(param.dtype) if div_scale <= 0 else grad.to(param.dtype) / div_scale
        rates = (1 - b**step if bias_correction else 1.0 for b in (beta1, beta2))
        states, words = (param, grad, exp_avg, exp_avg_sq), (lr, beta1, beta2, eps, weight_decay)
        CPUAdam.torch_adam_update(self, *states, *words, *rates, self._adamw)  # type: ignore[arg-type]


class _AdamExtension:
    """What HybridAdam and Gemini load in place of a compiled kernel."""

    CPUAdamOptimizer = _Adam

    def is_available(self) -> bool:
        return True

    def assert_compatible(self) -> None:
        """Torch runs everywhere."""

    def load(self) -> Any:
        return self


@contextmanager
def cpu_accelerator() -> Iterator[None]:
    """Inside, ColossalAI takes the host for its device.

    Give plugins `overlap_communication=False`: there are no streams to overlap on.

    Raises:
        RuntimeError: if there is a GPU; nothing of this is meant for one.
    """
    if torch.cuda.is_available():
        raise RuntimeError("cpu_accelerator() is for machines without a GPU; leave it out")
    with ExitStack() as undo:
        undo.callback(setattr, api, "_ACCELERATOR", api._ACCELERATOR)
        api.set_accelerator(HostAccelerator())
        extension: Any = _AdamExtension  # all that a loader asks for
        CPUAdamLoader.register_extension(extension)
        undo.callback(CPUAdamLoader.REGISTRY.remove, extension)
        # ColossalAI calls these without asking an accelerator
        undo.enter_context(temporarily_replace(dist, "is_hccl_available", lambda _: False))
        # Else its pipeline asks for torch's Backend.HCCL, which torch 2.13 does not have
        undo.enter_context(temporarily_replace(c10d, "is_nccl_available", lambda _: False))
        undo.enter_context(temporarily_replace(torch.cuda, "set_device", lambda _, device: None))
        yield
