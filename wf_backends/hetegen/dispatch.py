"""dispatch_model splits a model over an accelerator and its host; Handle.remove undoes it."""

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

from wf_backends._validation import is_real, of_type, parse_bytes
from wf_backends.hetegen.accelerator import Accelerator
from wf_backends.hetegen.modules import HostWeight, find_weights
from wf_backends.hetegen.pinned import move, pin_weights
from wf_backends.hetegen.runner import Device, Runner
from wf_backends.hetegen.split_model import (
    check_not_called,
    check_not_split,
    mark_modules,
    split_weights,
)
from wf_backends.hetegen.weights import PHASES, Plan, Request, make_plan

ACCELERATOR = "accelerator"
MAX_SETTING = 2**40  # tokens, sequences or slabs


class Handle:
    """A split model, until `remove`. Also a context manager.

    Attributes:
        model: the model itself.
        plan: where every row lies, what computes it, and the predicted seconds.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, runner: Runner | None, undo: ExitStack
    ) -> None:
        self.model, self.plan = model, plan
        self._runner, self._undo, self._removing = runner, undo, Lock()
        self._record = None if runner is None else runner.record

    def report(self) -> dict:
        """Measured and predicted figures, as plain data.

            phase -> {"passes", "measured_seconds" (median), "predicted_seconds", "call_seconds"}
            "lanes" -> lane -> {"busy_seconds", "predicted_busy_seconds", "idle_seconds", "bytes"}

        call_seconds: from the end of one call to the next, the mean of a pass, the median of
        passes. Busy and idle seconds add up to the time from the first pass to the end of the last.
        {"fits": True} if everything is resident. After `remove` the report does not change.
        """
        return {"fits": True} if self._record is None else self._record.report()

    def remove(self) -> None:
        """Restore the model and free the memory. A second call does nothing.

        Raises:
            RuntimeError: during a call of the model by any thread; the model stays split.
        """
        check = partial(check_not_called, self.model)
        with self._removing:
            if self._runner is None:
                check()
            else:
                self._runner.end(check)
            self._runner = None  # frees its memory, even if the handle is kept
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
    pin_memory: bool | Literal["weights"] = True,
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
        device: where it runs; None: the accelerator that torch finds. Its rates are then measured,
            which takes some seconds; `Accelerator(rates=...)` takes known rates.
        alpha: the share of each linear that the host computes; "auto": the fastest.
        pin_memory: True: copies pass through pinned memory, which is as large as the slabs.
            "weights": the weights that are copied are pinned themselves, so that the host copies
            nothing; the system cannot swap them. False: no memory is pinned.
        prefetch: slabs that may hold prefetched rows while one is filled and one is read.
        batch, prompt: sequences, and tokens of a prompt, for which the plan is made.

    Raises:
        ValueError: for a bad size or setting, a model that is not on the CPU or is split already,
            a device that another model uses, a model without linears to split, or too little
            memory for the tensors that are not split.
    """
    _check_free(model, device)
    _check_settings(alpha, pin_memory, prefetch, batch, prompt)
    accelerator_bytes, host_bytes = _parse_memory(max_memory)
    weights = find_weights(model)
    device = Accelerator() if device is None else device
    rates = device.rates(_main_dtype(weights), pin_memory)
    request = Request(
        linears=tuple(weight.linear for weight in weights),
        rates=rates if pin_memory else rates.unpinned(),
        accelerator_bytes=accelerator_bytes,
        host_bytes=host_bytes,
        other_bytes=sum(tensor.nbytes for tensor in _unsplit_tensors(model, weights)),
        decode_tokens=batch,
        prefill_tokens=batch * prompt,
        alpha=None if alpha == "auto" else float(alpha),
        slabs=prefetch + 2,
        pin_memory=pin_memory,
    )
    del weights  # they would keep the memory of weights that `_split` moves
    return _split(model, device, make_plan(request))


def _parse_memory(max_memory: Mapping[int | str, int | str]) -> tuple[int, float]:
    """(bytes of the accelerator, bytes of the host; inf if not given).

    Raises:
        ValueError: for an unknown key, a bad size, or a missing size of the accelerator.
    """
    of_type("max_memory", max_memory, Mapping, 'sizes such as {0: "20GB"}')
    sizes: dict[str, int] = {}
    for key, value in max_memory.items():
        memory = ACCELERATOR if str(key) == "0" else str(key)
        if memory not in (ACCELERATOR, "cpu"):
            raise ValueError(
                f'max_memory may have the keys 0 (or "{ACCELERATOR}") and "cpu", got {key!r}'
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
    """Refuse a model that is split already or not on the CPU, or a device that is in use."""
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
    if pin_memory != "weights":
        of_type("pin_memory", pin_memory, bool, 'True, False or "weights"')
    settings = {"prefetch": (prefetch, 0), "batch": (batch, 1), "prompt": (prompt, 1)}
    for name, (value, minimum) in settings.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ValueError(f"{name} must be a whole number of at least {minimum}, got {value!r}")
        if value > MAX_SETTING:
            raise ValueError(f"{name} must be at most {MAX_SETTING}, got {short(value)}")


def _unsplit_tensors(model: nn.Module, weights: list[HostWeight]) -> list[Tensor]:
    """Parameters and buffers that are not split, without duplicates."""
    split = {id(weight.parameter) for weight in weights}
    tensors = [*model.parameters(), *model.buffers()]
    return [tensor for tensor in tensors if id(tensor) not in split]


def _main_dtype(weights: list[HostWeight]) -> torch.dtype:
    """The dtype with the most bytes of split weights."""
    sizes = Counter[torch.dtype]()
    for weight in weights:
        sizes[weight.tensor.dtype] += weight.linear.nbytes
    return sizes.most_common(1)[0][0]


def _split(model: nn.Module, device: Device, plan: Plan) -> Handle:
    """Allocate memory and have the runner compute the linears; an error undoes everything."""
    with ExitStack() as undo:
        undo.callback(device.close)
        device.in_use = True
        mark_modules(model, undo)
        runner, weights = None, list[HostWeight]()
        if plan.fits:
            warnings.warn(
                f"the model takes {plan.accelerator_bytes} bytes and fits the accelerator's "
                f"{plan.request.accelerator_bytes}: it is simply resident, and nothing is split",
                stacklevel=3,
            )
        else:
            plan, buffers = _pin(model, plan, device, undo)
            weights = find_weights(model)
            runner = Runner(plan, weights, device, buffers)
            split_weights(model, weights, runner, undo)
        for tensor in _unsplit_tensors(model, weights):
            undo.callback(setattr, tensor, "data", tensor.data)
            move(tensor, device.place)
        return Handle(model, plan, runner, undo.pop_all())


def _pin(
    model: nn.Module, plan: Plan, device: Device, undo: ExitStack
) -> tuple[Plan, list[Tensor]]:
    """(the plan, a pinned buffer for each slab if copies pass through them).

    Pins the weights if the plan says so. If no pinned memory is left: a plan without, and a
    warning.
    """
    pin_memory = plan.request.pin_memory
    if not plan.slabs or not pin_memory:
        return plan, []
    try:
        if pin_memory == "weights":
            pin_weights(_streamed_parameters(model, plan), device.pinned, undo)
            return plan, []
        return plan, [device.pinned(plan.slab_bytes) for _ in range(plan.slabs)]
    except (MemoryError, RuntimeError) as error:
        request = replace(plan.request, rates=plan.rates.unpinned(), pin_memory=False)
        slower = make_plan(request)
        warnings.warn(
            f"pinned memory ran out ({error}): copies are pageable, {slower.rates.link:.3g} "
            f"bytes/s instead of {plan.rates.link:.3g}, and a decoding pass should take "
            f"{slower.decode_seconds:.3g} s instead of {plan.decode_seconds:.3g} s",
            stacklevel=4,
        )
        return slower, []


def _streamed_parameters(model: nn.Module, plan: Plan) -> list[nn.Parameter]:
    """The parameters with rows that are copied in some phase, without duplicates."""
    pairs = zip(find_weights(model), plan.splits, strict=True)
    streamed = (w.parameter for w, split in pairs if any(map(split.streamed, PHASES)))
    return list(dict.fromkeys(streamed))
