"""Refuses optimizers that would not step with averaged gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from wf_backends._compile import eager
from wf_transformers import Handle

if TYPE_CHECKING:
    from accelerate import Accelerator


class AveragedGradients:
    """Refuses a step with gradients of this rank alone: inside DDP's `no_sync()`, inside a
    backward under DDP, which averages at its end, and of optimizers that step by hooks of theirs.
    (FSDP averages the gradient of a parameter before its hooks run.)"""

    def __init__(self, model: nn.Module, accelerator: Accelerator, handle: Handle) -> None:
        self._model, self._wrapper = model, None
        self._accelerator = ref(accelerator)  # copies of the model copy neither
        handle.before(model, self._before)
        handle.undo.callback(register_optimizer_step_pre_hook(self._refuse).remove)

    @eager
    def _before(self, *_: Any) -> None:
        if getattr(self._accelerator(), "has_lomo_optimizer", False):
            raise NotImplementedError(
                "LOMO and AdaLOMO change a parameter inside the backward, by the gradient of this "
                "rank's tokens alone: take another optimizer"
            )
        ddp: Any = DistributedDataParallel._active_ddp_module
        self._wrapper = None if ddp is None else ref(ddp)

    def _refuse(self, optimizer: Any, *_: Any) -> None:
        ddp = None if self._wrapper is None else self._wrapper()
        own = set(map(id, self._model.parameters()))
        if ddp is None or own.isdisjoint(map(id, _parameters(optimizer))):
            return
        if not ddp.require_backward_grad_sync:
            raise NotImplementedError(
                "a step of an optimizer inside no_sync() of DDP, as accelerate's LocalSGD makes: "
                "gradients are not averaged, and a rank's own are of its tokens only. Leave "
                "LocalSGD out, or make the step outside of no_sync()"
            )
        if torch._C._current_graph_task_id() >= 0 and not _steps_by_ddp(optimizer):
            raise NotImplementedError(
                "a step of an optimizer inside the backward, under DDP: gradients are not averaged "
                "yet, and a rank's own are of its tokens only. Make the step after the backward, "
                "or train under FSDP2"
            )


def _parameters(optimizer: Any) -> Iterator[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _steps_by_ddp(optimizer: Any) -> bool:
    """Whether DDP itself steps, after it has averaged (torch's `_apply_optimizer_in_backward`)."""
    return all(hasattr(p, "_in_backward_optimizers") for p in _parameters(optimizer))
