"""What a user calls: split a model over an accelerator and its host, and undo it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import inf
from reprlib import repr as short
from threading import Lock
from typing import Literal, cast

import torch
from torch import Tensor, nn

from wf_backends._validation import is_real, nearest, of_type, parse_bytes
from wf_backends.hetegen.accelerator import Accelerator
from wf_backends.hetegen.modules import HostWeight, find_weights
from wf_backends.hetegen.runner import Device, Runner
from wf_backends.hetegen.split_model import (
    check_not_called,
    check_not_split,
    mark_modules,
    split_weights,
)
from wf_backends.weights import Plan, Request, make_plan

ACCELERATOR = "accelerator"
KEYS = (ACCELERATOR, "cpu")
MOST_TOKENS = 2**40  # and slabs


class Handle:
    """A model that is split, until `remove`. Also a context manager.

    Attributes:
        model: the one that was given.
        plan: what lies where, who computes what, and what that should take.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, runner: Runner | None, undo: ExitStack
    ) -> None:
        self.model, self.plan = model, plan
        self._runner, self._undo, self._removing = runner, undo, Lock()
        self._record = None if runner is None else runner.record

    def report(self) -> dict:
        """Measured beside predicted, as plain data.

            phase -> {"passes", "measured_seconds" (median), "predicted_seconds", "call_seconds"}
            "lanes" -> lane -> {"busy_seconds", "predicted_busy_seconds", "idle_seconds", "bytes"}

        call_seconds: from the end of a call to the next, the mean of a pass, the median of passes.
        idle: of the time from the first pass to the end of the last. {"fits": True} where
        everything is resident. After `remove` it is what it was then.
        """
        return {"fits": True} if self._record is None else self._record.report()

    def remove(self) -> None:
        """Put the model back as it was, and give the memory back. Twice is as good as once.

        Raises:
            RuntimeError: within a call of the model, this thread's or another's; it stays split.
        """
        check = partial(check_not_called, self.model)
        with self._removing:
            if self._runner is None:
                check()
            else:
                self._runner.end(check)
            self._runner = None  # its memory goes, though the handle may stay
            self._undo.close()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def dispatch_model(
    model: nn.Module,
    max_memory: Mapping[int | str, int | str],
    device: Device | None = None,
    *,
    alpha: float | Literal["auto"] = "auto",
    pin_memory: bool = True,
    prefetch: int = 1,
    batch: int = 1,
    prompt: int = 512,
) -> Handle:
    """Split a model's linears by rows over an accelerator and its host.

    The model is called as before: `model(ids)`, `model.generate(ids)`. Its weights stay in host
    memory; resident rows are copies.

    Args:
        model: on the CPU. nn.Linear, transformers' Conv1D and experts are split, other modules
            resident.
        max_memory: {0: "20GB", "cpu": "100GB"}: bytes for weights and slabs, without activations
            and caches. "cpu" may be left out; "accelerator" may stand for 0.
        device: where it runs. If not given, the accelerator that torch finds, whose rates are
            measured, in some seconds; `Accelerator(rates=...)` says them.
        alpha: the share of each linear that the host computes, "auto" for the fastest.
        pin_memory: whether copies pass through pinned memory, as much as slabs take.
        prefetch: slabs that may be full while one is filled and one is read.
        batch, prompt: sequences, and tokens of a prompt, that the plan is made for.

    Raises:
        ValueError: for a bad size or setting, a model that is not on the CPU or is split already,
            a device that another model uses, if there is nothing to split, or if what is not split
            exceeds the memory.
    """
    _check_free(model, device)
    _check_settings(alpha, pin_memory, prefetch, batch, prompt)
    accelerator_bytes, host_bytes = _parse(max_memory)
    weights = find_weights(model)
    device = Accelerator() if device is None else device
    rates = device.rates(_type_of_most(weights))
    request = Request(
        linears=tuple(weight.linear for weight in weights),
        rates=rates if pin_memory else rates.unpinned(),
        accelerator_bytes=accelerator_bytes,
        host_bytes=host_bytes,
        other_bytes=sum(tensor.nbytes for tensor in _others(model, weights)),
        decode_tokens=batch,
        prefill_tokens=batch * prompt,
        alpha=None if alpha == "auto" else float(alpha),
        slabs=prefetch + 2,
        pinned=pin_memory,
    )
    return _split(model, weights, device, make_plan(request))


def _parse(max_memory: Mapping[int | str, int | str]) -> tuple[int, float]:
    """(bytes of the accelerator, bytes of the host: inf if not given).

    Raises:
        ValueError: for a key that there is not, a bad size, or no size for the accelerator.
    """
    of_type("max_memory", max_memory, Mapping, 'sizes such as {0: "20GB"}')
    sizes: dict[str, int] = {}
    for key, value in max_memory.items():
        memory = ACCELERATOR if str(key) == "0" else str(key)
        if memory not in KEYS:
            raise ValueError(
                f'max_memory may have the keys 0 (or "{ACCELERATOR}") and "cpu", '
                f"got {key!r}{nearest(key, KEYS)}"
            )
        if memory in sizes:
            raise ValueError(f'max_memory has both 0 and "{ACCELERATOR}", which are the same')
        sizes[memory] = parse_bytes(f"max_memory[{key!r}]", value)
    if ACCELERATOR not in sizes:
        raise ValueError(
            f'max_memory must say how much of the accelerator may be used, as {{0: "20GB"}}; '
            f"got {dict(max_memory)!r}"
        )
    return sizes[ACCELERATOR], sizes.get("cpu", inf)


def _check_free(model: nn.Module, device: Device | None) -> None:
    """Refuse a model that is split already or not on the CPU, and a device that is in use."""
    of_type("model", model, nn.Module, "a torch.nn.Module")
    check_not_split(model)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type != "cpu":
            raise ValueError(f"model must be on the CPU, got {name} on {tensor.device}")
    of_type("device", device, Device | None, "an Accelerator() or a ShapedDevice(...)")
    if device is not None and device.in_use:
        raise ValueError(
            f"device is that of another model that is split: give each a {type(device).__name__} "
            "of its own, or call the other's handle.remove() first"
        )


def _check_settings(
    alpha: object, pin_memory: object, prefetch: object, batch: object, prompt: object
) -> None:
    if alpha != "auto" and not (is_real(alpha) and 0 <= cast(float, alpha) <= 1):
        raise ValueError(f'alpha must be "auto" or a share from 0 to 1, got {alpha!r}')
    of_type("pin_memory", pin_memory, bool, "True or False")
    least = {"prefetch": (prefetch, 0), "batch": (batch, 1), "prompt": (prompt, 1)}
    for name, (value, low) in least.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ValueError(f"{name} must be a whole number of at least {low}, got {value!r}")
        if value > MOST_TOKENS:
            raise ValueError(f"{name} must be at most {MOST_TOKENS}, got {short(value)}")


def _others(model: nn.Module, weights: list[HostWeight]) -> list[Tensor]:
    """Parameters and buffers that are not split, each once."""
    split = {id(weight.parameter) for weight in weights}
    tensors = [*model.parameters(), *model.buffers()]
    return [tensor for tensor in tensors if id(tensor) not in split]


def _type_of_most(weights: list[HostWeight]) -> torch.dtype:
    """The type that has the most bytes of the split weights."""
    sizes = Counter[torch.dtype]()
    for weight in weights:
        sizes[weight.tensor.dtype] += weight.linear.nbytes
    return sizes.most_common(1)[0][0]


def _split(model: nn.Module, weights: list[HostWeight], device: Device, plan: Plan) -> Handle:
    """Take memory, and have linears ask the runner; an error undoes all of it."""
    with ExitStack() as undo:
        undo.callback(device.close)
        device.in_use = True
        mark_modules(model, undo)
        runner = None
        if plan.fits:
            weights = []
            warnings.warn(
                f"the model takes {plan.accelerator_bytes} bytes and fits the accelerator's "
                f"{plan.request.accelerator_bytes}: it is simply resident, and nothing is split",
                stacklevel=3,
            )
        else:
            plan, pinned = _pin(plan, device)
            runner = Runner(plan, weights, device, pinned)
            split_weights(model, weights, runner, undo)
        for tensor in _others(model, weights):
            undo.callback(setattr, tensor, "data", tensor.data)
            tensor.data = device.place(tensor.data)
        return Handle(model, plan, runner, undo.pop_all())


def _pin(plan: Plan, device: Device) -> tuple[Plan, list[Tensor]]:
    """Pinned memory as large as the slabs; where none is left a plan without it, and a warning."""
    if not (plan.slabs and plan.request.pinned):
        return plan, []
    try:
        return plan, [device.pinned(plan.slab_bytes) for _ in range(plan.slabs)]
    except (MemoryError, RuntimeError) as error:
        request = replace(plan.request, rates=plan.rates.unpinned(), pinned=False)
        slower = make_plan(request)
        warnings.warn(
            f"pinned memory ran out ({error}): copies are pageable, {slower.rates.link:.3g} "
            f"bytes/s instead of {plan.rates.link:.3g}, and a decoding pass should take "
            f"{slower.decode_seconds:.3g} s instead of {plan.decode_seconds:.3g} s",
            stacklevel=4,
        )
        return slower, []
