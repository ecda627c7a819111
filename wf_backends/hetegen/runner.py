"""Running the jobs of a plan on the lanes of a device, and what is told of it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import fmean, median
from threading import Lock, Thread, current_thread
from typing import Any

import torch
from torch import Tensor, nn

from wf_backends.hetegen.accelerator import Accelerator
from wf_backends.hetegen.device import ShapedDevice
from wf_backends.hetegen.modules import HostWeight
from wf_backends.weights import LANE_NAMES, PHASES, Job, JobMaker, Phase, Plan

PASSES_KEPT = 256
Device = Accelerator | ShapedDevice
Event = Any  # of a device's work: only the device that made it looks inside
Moment = Any  # of the caller's time: likewise


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
        self._ended = False
        self._lock = Lock()  # one call at a time, whichever thread it comes from
        self._restart()

    def _restart(self) -> None:
        """Forget what is in the slabs, and which calls were running."""
        self._maker = JobMaker(self._plan)
        self._running: dict[Thread, nn.Module] = {}  # the outermost that each is in
        self._events: dict[int, Event] = {}  # slab -> the end of the last job that has it

    def enter(self, module: nn.Module, *_: Any) -> None:
        """A module is called: from outside, a pass begins with the next split linear.

        Ctrl-C ends a call without `leave`: the next call of its outermost module is from outside.
        """
        if torch.compiler.is_compiling():
            return
        with self._lock:
            self._refuse_if_ended()
            if self._running.setdefault(current_thread(), module) is module:
                self._maker.first_linear = None

    def leave(self, module: nn.Module, *_: Any) -> None:
        """A module's call has ended, also one whose hooks failed before `enter`."""
        if torch.compiler.is_compiling():
            return
        with self._lock:
            if self._running.get(current_thread()) is module:
                del self._running[current_thread()]

    def end(self, check: Callable[[], None]) -> None:
        """Take no more calls, unless `check` raises."""
        with self._lock:
            check()
            self._ended = True

    def _refuse_if_ended(self) -> None:
        if self._ended:
            raise RuntimeError(
                "the model is called while handle.remove() puts it back: call it again afterwards"
            )

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

    def linear(self, index: int, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (..., columns) times the transposed weight `index`, plus bias (rows,): (..., rows).

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
            jobs = self._maker.make_jobs(index, phase)
            begun = self._device.now()
            events = [self._submit(job, flat, flat_out[:, job.start : job.stop]) for job in jobs]
            self.record.ask(jobs, phase)
            computed = [e for e, job in zip(events, jobs, strict=True) if job.lane != "link"]
            ended = self._device.wait(computed)
            self.record.add_call(phase, index == self._maker.first_linear, begun, ended)
        return out if bias is None else out.add_(bias)

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


def _like(rows: Tensor, memory: Tensor) -> Tensor:
    """The beginning of `memory` as a tensor like `rows`."""
    return memory[: rows.nbytes].view(rows.dtype).view(rows.shape)


class Record:
    """What the lanes of a device are asked for, and when calls of split linears begin and end.

    A pass of the model is from the jobs of its first split linear to the end of its last.
    """

    def __init__(self, plan: Plan, device: Device) -> None:
        self._plan, self._device, self._busy = plan, device, device.busy_seconds
        # Phase; when each call began and ended, in turns. The latest passes; all are counted.
        self._passes: deque[tuple[Phase, list[Moment]]] = deque(maxlen=PASSES_KEPT)
        self._num_passes: Counter[Phase] = Counter()
        self._began: Moment = None
        self._bytes: dict[str, int] = dict.fromkeys(LANE_NAMES, 0)
        self._predicted: dict[str, float] = dict.fromkeys(LANE_NAMES, 0.0)

    def ask(self, jobs: Sequence[Job], phase: Phase) -> None:
        """The lanes are asked for jobs."""
        for job in jobs:
            self._bytes[job.lane] += self._plan.bytes_of(job)
            self._predicted[job.lane] += self._plan.seconds_of(job, phase)

    def add_call(self, phase: Phase, begins_pass: bool, begun: Moment, ended: Moment) -> None:
        if begins_pass or not self._passes:
            self._passes.append((phase, []))
            self._num_passes[phase] += 1
            self._began = begun if self._began is None else self._began
        self._passes[-1][1].extend((begun, ended))

    def report(self) -> dict:
        """What `Handle.report` returns."""
        between = self._device.seconds
        wall = between(self._began, self._passes[-1][1][-1]) if self._passes else 0.0
        lanes = {}
        for name in LANE_NAMES:
            busy = self._busy.get(name, 0.0)  # 0 of one that is no thread
            lanes[name] = {
                "busy_seconds": busy,
                "predicted_busy_seconds": self._predicted[name],
                "idle_seconds": max(0.0, wall - busy),
                "bytes": self._bytes[name],
            }
        phases = {phase: self._phase_report(phase) for phase in PHASES}
        return {"fits": False, **phases, "lanes": lanes}

    def _phase_report(self, phase: Phase) -> dict[str, float | None]:
        plan, between = self._plan, self._device.seconds
        own = [moments for of, moments in self._passes if of == phase]
        thought = [list(map(between, moments[1::2], moments[2::2])) for moments in own]
        calls = [fmean(each) for each in thought if each]
        return {
            "passes": self._num_passes[phase],
            "measured_seconds": median(between(each[0], each[-1]) for each in own) if own else None,
            "predicted_seconds": plan.decode_seconds if phase == "decode" else plan.prefill_seconds,
            "call_seconds": median(calls) if calls else None,
        }
