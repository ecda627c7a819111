"""What a user calls: split a model over an accelerator and its host, and undo it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from torch import Tensor, nn

from wf_backends.hetegen.accelerator import Accelerator
from wf_backends.hetegen.device import Device
from wf_backends.hetegen.memory import parse_max_memory
from wf_backends.hetegen.modules import Found, find_linears, stand_in
from wf_backends.hetegen.plan import Plan
from wf_backends.hetegen.planning import Request, make_plan
from wf_backends.hetegen.report import report
from wf_backends.hetegen.runner import Runner


class Handle:
    """A model that is split, until `remove`. Also a context manager.

    Attributes:
        model: the one that was given.
        plan: what lies where, who computes what, and what that should take.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, runner: Runner | None, undo: Callable[[], None]
    ) -> None:
        self.model, self.plan = model, plan
        self._runner, self._undo = runner, undo
        self._removed = False

    def report(self) -> dict:
        """Measured beside predicted: seconds of a pass by phase; by lane busy, idle and bytes."""
        return report(self.plan, self._runner)

    def remove(self) -> None:
        """Put the model back as it was, and give the memory back. Twice is as good as once."""
        if not self._removed:
            self._removed = True
            self._undo()

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
        model: on the CPU. nn.Linear and transformers' Conv1D are split, other modules resident.
        max_memory: {0: "20GB", "cpu": "100GB"}: bytes for weights and slabs, "cpu" may be left
            out. Leave room for activations and caches. "accelerator" may stand for 0.
        device: where it runs; the accelerator that torch finds if not given.
        alpha: the share of each linear that the host computes, "auto" for the fastest.
        pin_memory: whether copies pass through pinned memory, as much as slabs take.
        prefetch: slabs that may be full while one is filled and one is read.
        batch, prompt: sequences, and tokens of a prompt, that the plan is made for.

    Raises:
        ValueError: for a bad size or setting, if there is nothing to split, or if what is not
            split exceeds the memory.
    """
    accelerator_bytes, host_bytes = parse_max_memory(max_memory)
    _check(alpha, prefetch, batch, prompt)
    found = find_linears(model)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has nothing to split: no nn.Linear or Conv1D of its own "
            "with 16 output features or more"
        )
    device = Accelerator() if device is None else device
    request = Request(
        linears=tuple(f.linear for f in found),
        rates=device.rates(),
        accelerator_bytes=accelerator_bytes,
        other_bytes=sum(tensor.nbytes for tensor in others(model, found)),
        decode_tokens=batch,
        prefill_tokens=batch * prompt,
        alpha=None if alpha == "auto" else float(alpha),
        prefetch=prefetch,
    )
    if not pin_memory:
        request = pageable(request, device)
    plan = make_plan(request)
    if plan.host_bytes > host_bytes:
        raise ValueError(
            f'max_memory["cpu"] must be at least {plan.host_bytes} bytes, which the weights that '
            f"are split and pinned memory take; got {max_memory['cpu']!r}"
        )
    undo_place = place(model, found, device, everything=plan.fits)
    if plan.fits:
        warnings.warn(
            f"the model takes {plan.accelerator_bytes} bytes and fits the accelerator's "
            f"{accelerator_bytes}: it is simply resident, and nothing is split",
            stacklevel=2,
        )
        return Handle(model, plan, None, undo_place)
    try:
        plan, runner = make_runner(plan, request, found, device, pin_memory)
    except BaseException:
        undo_place()
        raise
    put_back = stand_in(model, found, runner)

    def undo() -> None:
        put_back()
        undo_place()

    return Handle(model, plan, runner, undo)


def _check(alpha: object, prefetch: object, batch: object, prompt: object) -> None:
    if alpha != "auto" and not (isinstance(alpha, int | float) and 0 <= alpha <= 1):
        raise ValueError(f'alpha must be "auto" or a share from 0 to 1, got {alpha!r}')
    least = {"prefetch": (prefetch, 0), "batch": (batch, 1), "prompt": (prompt, 1)}
    for name, (value, low) in least.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ValueError(f"{name} must be a whole number of at least {low}, got {value!r}")


def others(model: nn.Module, found: list[Found]) -> list[Tensor]:
    """Parameters and buffers that are not split, each once."""
    split = {id(f.module.weight) for f in found}
    tensors = [*model.parameters(), *model.buffers()]
    return [tensor for tensor in tensors if id(tensor) not in split]


def place(
    model: nn.Module, found: list[Found], device: Device, everything: bool
) -> Callable[[], None]:
    """Put what is not split, or everything, in the accelerator's memory; what undoes it."""
    tensors = [*model.parameters(), *model.buffers()] if everything else others(model, found)
    before = [(tensor, tensor.data) for tensor in tensors]
    for tensor in tensors:
        tensor.data = device.place(tensor.data)

    def undo() -> None:
        for tensor, data in before:
            tensor.data = data
        device.close()

    return undo


def pageable(request: Request, device: Device) -> Request:
    """The request, for copies from memory that is not pinned."""
    link = min(request.rates.link, device.pageable_link())
    return replace(request, rates=replace(request.rates, link=link))


def make_runner(
    plan: Plan, request: Request, found: list[Found], device: Device, pin: bool
) -> tuple[Plan, Runner]:
    """A runner with its memory; without pinned memory if there is too little, and a warning."""
    weights = [f.weight for f in found]
    try:
        memory = device.pinned(plan.slabs * plan.slab_bytes) if pin and plan.slabs else None
    except MemoryError as error:
        slower = make_plan(pageable(request, device))
        warnings.warn(
            f"pinned memory ran out ({error}): copies are pageable, {slower.rates.link:.3g} "
            f"bytes/s instead of {plan.rates.link:.3g}, and a decoding pass should take "
            f"{slower.decode_seconds:.3g} s instead of {plan.decode_seconds:.3g} s",
            stacklevel=3,
        )
        return slower, Runner(slower, weights, device, [])
    pinned = [] if memory is None else memory.split(plan.slab_bytes)
    return plan, Runner(plan, weights, device, pinned)
