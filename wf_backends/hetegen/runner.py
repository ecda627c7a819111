"""Running the jobs of a plan on the lanes of a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock, Thread, current_thread
from typing import Any

import torch
from torch import Tensor

from wf_backends._compile import refuse_transforms
from wf_backends.hetegen.device import Device, Event
from wf_backends.hetegen.jobs import JobMaker
from wf_backends.hetegen.modules import HostWeight
from wf_backends.hetegen.plan import Job, Plan
from wf_backends.hetegen.record import Record


class Runner:
    """Calls of split linears on a device.

    Args:
        plan: how they are split.
        weights: one for each split of the plan.
        device: has the lanes.
        pinned: memory as large as the slabs, through which copies pass; empty: they do not.

    Attributes:
        where: the torch device of inputs and outputs.
        record: of what the lanes are asked for.
    """

    def __init__(
        self,
        plan: Plan,
        weights: Sequence[HostWeight],
        device: Device,
        pinned: Sequence[Tensor],
    ) -> None:
        self._plan, self._weights, self._device = plan, weights, device
        slab = torch.empty(plan.slab_bytes, dtype=torch.uint8)
        self._slabs = [device.place(slab) for _ in range(plan.slabs)]
        self._pinned = pinned
        self._resident = [
            device.place(weight.rows(0, split.resident))
            for split, weight in zip(plan.splits, weights, strict=True)
        ]
        self.where = self._resident[0].device
        self.record = Record(plan, device)
        self._running: Counter[Thread] = Counter()  # how many modules each is in
        self._ended = False
        self._versions = [_version(weight.tensor) for weight in weights]
        self._lock = Lock()  # one call at a time, whichever thread it comes from
        self._restart()

    def enter(self, *_: Any) -> None:
        """A module is called: a pass begins with the next split linear if none was running."""
        if torch.compiler.is_compiling():
            return
        with self._lock:
            self._refuse_if_ended()
            if current_thread() not in self._running:
                self._maker.first = None
            self._running[current_thread()] += 1

    def leave(self, *_: Any) -> None:
        """A module's call has ended, also one whose hooks failed before `enter`."""
        if torch.compiler.is_compiling():
            return
        with self._lock:
            self._running -= Counter([current_thread()])  # no count is below 0

    def end(self, check: Callable[[], None]) -> None:
        """Take no more calls, unless `check` raises; the report stays as it is."""
        with self._lock:
            if not self._ended:
                check()
                self._ended = True
                self.record.end()

    def _refuse_if_ended(self) -> None:
        if self._ended:
            raise RuntimeError(
                "the model is called while handle.remove() puts it back: call it again afterwards"
            )

    def _restart(self) -> None:
        """Forget what is in the slabs."""
        self._maker = JobMaker(self._plan)
        self._events: dict[int, Event] = {}  # slab -> the end of the last job that has it

    def linear(self, index: int, x: Tensor) -> Tensor:
        """x (..., columns) times the transposed weight `index`: (..., rows).

        Raises:
            NotImplementedError: where a gradient would be needed, or weights of another type.
            ValueError: for an input that does not fit, or weights that were changed meanwhile.
            Exception: what a lane raised. The lanes are stopped then; the next call starts anew.
        """
        self._refuse_gradient(index, x)
        x = self._checked(index, x)
        rows = self._plan.splits[index].linear.rows
        out = x.new_empty(*x.shape[:-1], rows)
        if x.numel() == 0:
            return out
        flat, flat_out = x.detach().reshape(-1, x.shape[-1]), out.view(-1, rows)
        phase = self._plan.request.phase(len(flat))
        with self._stopping_on_errors():
            jobs = self._maker.call(index, phase)
            self.record.begin_call(phase, index == self._maker.first)
            computed = []
            for job in jobs:
                event = self._submit(job, flat, flat_out[:, job.start : job.stop])
                if job.lane != "link":
                    computed.append(event)
                self.record.ask(job, phase)
            self.record.end_call(self._device.wait(computed))
        return out

    def _submit(self, job: Job, x: Tensor, out: Tensor) -> Event:
        """Have its lane do a job of x (n, columns) and out (n, rows of the job)."""
        device, weight = self._device, self._weights[job.linear]
        rows = weight.rows(job.start, job.stop)
        if job.lane == "host":
            return device.on_host(partial(weight.multiply, rows), x, out, rows.nbytes)
        if job.slab is None:
            multiply = partial(weight.multiply, self._resident[job.linear], x, out)
            return device.compute(multiply, rows.nbytes, None)
        there, after = _like(rows, self._slabs[job.slab]), self._events.get(job.slab)
        if job.lane == "link":
            pinned = _like(rows, self._pinned[job.slab]) if self._pinned else None
            event = device.copy(rows, pinned, there, after)
        else:
            event = device.compute(partial(weight.multiply, there, x, out), rows.nbytes, after)
        self._events[job.slab] = event
        return event

    def lookup(self, index: int, ids: Tensor) -> Tensor:
        """Rows `ids` (...) of weight `index` (n, d), a table in host memory: (..., d)."""
        self._refuse_gradient(index, ids)
        table = self._weights[index].tensor
        out = table.new_empty(*ids.shape, table.shape[1], device=ids.device)
        with self._stopping_on_errors():
            look_up = self._weights[index].look_up
            self._device.wait([self._device.on_host(look_up, ids, out, out.nbytes)])
        return out

    def _refuse_gradient(self, index: int, x: Tensor) -> None:
        """Refuse an input or a weight whose gradient is asked for, in whatever way."""
        refuse_transforms("a split linear", "give samples as a batch", input=x)
        learned = self._weights[index].module.weight.requires_grad
        if torch.is_grad_enabled() and (x.requires_grad or learned):
            raise NotImplementedError(
                "a split linear has no gradient: call the model under torch.no_grad()"
            )

    def _checked(self, index: int, x: Tensor) -> Tensor:
        """The input as autocast has it, if the lanes can multiply it, with weights as they were."""
        linear, tensor = self._plan.splits[index].linear, self._weights[index].tensor
        if x.device != self.where:
            raise ValueError(f"{linear.name} takes an input on {self.where}, got {x.device}")
        x = _as_autocast(x, tensor.dtype)
        if x.shape[-1:] != (linear.columns,) or x.dtype != tensor.dtype:
            raise ValueError(
                f"{linear.name} takes an input (..., {linear.columns}) of {tensor.dtype}, "
                f"got {tuple(x.shape)} of {x.dtype}"
            )
        if _version(tensor) != self._versions[index]:
            raise ValueError(
                f"{linear.name}.weight was changed while the model is split, and the accelerator "
                "has copies of the old one: call handle.remove(), then dispatch_model again"
            )
        return x

    @contextmanager
    def _stopping_on_errors(self) -> Iterator[None]:
        """Stop the lanes if the block raises anything, Ctrl-C too, and begin anew afterwards."""
        with self._lock:
            self._refuse_if_ended()
            try:
                yield
            except BaseException:
                self._device.stop()
                self._restart()
                raise


def _as_autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The input as autocast, where it is on, would give it to a product with weights of `dtype`.

    It leaves float64 alone.
    """
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or torch.float64 in (x.dtype, dtype):
        return x
    if torch.get_autocast_dtype(kind) != dtype:
        raise NotImplementedError(
            f"a split linear of {dtype} is not computed in another type, and autocast asks for "
            f"{torch.get_autocast_dtype(kind)}: call without autocast, or convert the model before "
            "dispatch_model"
        )
    return x.to(dtype)


def _version(tensor: Tensor) -> int:
    """How often it was written to; 0 of one that does not count."""
    return 0 if tensor.is_inference() else tensor._version


def _like(rows: Tensor, memory: Tensor) -> Tensor:
    """The beginning of `memory` as a tensor like `rows`."""
    return memory[: rows.nbytes].view(rows.dtype).view(rows.shape)
