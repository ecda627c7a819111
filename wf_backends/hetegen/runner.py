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

from wf_backends.hetegen.device import Device, Event
from wf_backends.hetegen.jobs import JobMaker
from wf_backends.hetegen.modules import HostWeight
from wf_backends.hetegen.plan import Job, Plan
from wf_backends.hetegen.record import Record


class Uncopied:
    """What modules and their hooks hold while they are split: refuses to be copied for them."""

    def __reduce_ex__(self, _: Any) -> Any:
        raise ValueError(
            "a model that is split by dispatch_model is neither copied nor pickled: call "
            "handle.remove() first, or take its state_dict()"
        )


class Runner(Uncopied):
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

    def free(self) -> None:
        """Give back what lies on the accelerator, and pinned memory; no lane works any more."""
        self._slabs, self._resident, self._pinned = [], [], []
        self._events.clear()

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
        weight = self._weights[index]
        weight.refuse_gradient(x)
        x, rows = weight.checked(x, self.where), weight.linear.rows
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
        weight = self._weights[index]
        weight.refuse_gradient(ids)
        out = weight.tensor.new_empty(*ids.shape, weight.linear.columns, device=ids.device)
        with self._stopping_on_errors():
            self._device.wait([self._device.on_host(weight.look_up, ids, out, out.nbytes)])
        return out

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


def _like(rows: Tensor, memory: Tensor) -> Tensor:
    """The beginning of `memory` as a tensor like `rows`."""
    return memory[: rows.nbytes].view(rows.dtype).view(rows.shape)
