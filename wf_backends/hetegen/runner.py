"""Runs the jobs of a plan on the lanes of a device, and records bytes and times for the report."""

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
from wf_backends.hetegen.device import ShapedDevice, multiply
from wf_backends.hetegen.modules import HostWeight
from wf_backends.hetegen.weights import LANE_NAMES, PHASES, Job, JobMaker, Phase, Plan

PASSES_KEPT = 256
Device = Accelerator | ShapedDevice
Event = Any  # the end of a device's work; only the device knows its type
Moment = Any  # a time of the caller's work; only the device knows its type


class Uncopyable:
    """Refuses to be copied or pickled, and with it the split modules whose hooks refer to it."""

    def __reduce_ex__(self, _: Any) -> Any:
        raise ValueError(
            "a model that is split by dispatch_model is neither copied nor pickled: call "
            "handle.remove() first, or take its state_dict()"
        )


class Runner(Uncopyable):
    """Computes the calls of split linears on a device.

    Args:
        plan: how the linears are split.
        weights: one for each split of the plan.
        device: has the lanes.
        pinned: a buffer for each slab, through which copies pass; empty: they do not.

    Attributes:
        compute_device: the torch device of inputs and outputs.
        record: counts what the lanes do.
    """

    def __init__(
        self, plan: Plan, weights: Sequence[HostWeight], device: Device, pinned: Sequence[Tensor]
    ) -> None:
        self._plan, self._weights, self._device = plan, weights, device
        slab = torch.empty(plan.slab_bytes, dtype=torch.uint8, device="cpu")
        self._slabs = [device.place(slab) for _ in range(plan.slabs)]
        self._pinned = pinned
        self._resident = [
            device.place(weight.rows(0, split.resident))
            for split, weight in zip(plan.splits, weights, strict=True)
        ]
        self.compute_device = self._resident[0].device
        self.record = Record(plan, device)
        self._ended = False
        self._lock = Lock()  # one call at a time, of all threads
        self._restart()

    def _restart(self) -> None:
        """Forget what is in the slabs, and which modules are being called."""
        self._maker = JobMaker(self._plan)
        self._outermost: dict[Thread, nn.Module] = {}  # the outermost module that a thread calls
        self._slab_events: dict[int, Event] = {}  # slab -> the end of the last job with it

    def enter(self, module: nn.Module, *_: Any) -> None:
        """Before a module's call: if it is the outermost, the next split linear begins a pass.

        Ctrl-C ends a call without `leave`; the next call of its outermost module begins a pass too.
        """
        if torch.compiler.is_compiling():
            return
        with self._lock:
            self._refuse_if_ended()
            if self._outermost.setdefault(current_thread(), module) is module:
                self._maker.first_linear = None

    def leave(self, module: nn.Module, *_: Any) -> None:
        """After a module's call, even if an earlier hook failed and `enter` was not called."""
        if torch.compiler.is_compiling():
            return
        with self._lock:
            if self._outermost.get(current_thread()) is module:
                del self._outermost[current_thread()]

    def end(self, check: Callable[[], None]) -> None:
        """Refuse calls from now on, unless `check` raises."""
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
        """Hold the lock; if the block raises anything, even Ctrl-C, stop the lanes and restart."""
        with self._lock:
            self._refuse_if_ended()
            if self._device.has_raised():
                self._stop()
            try:
                yield
            except BaseException:
                self._stop()
                raise

    def _stop(self) -> None:
        self._device.stop()
        self._restart()

    def linear(self, index: int, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (..., columns) times the transposed weight `index`, plus bias (rows,): (..., rows).

        Raises:
            NotImplementedError: if a gradient is needed, or autocast asks for another dtype.
            ValueError: for a wrong input, or a weight that was written to since it was split.
            Exception: what a lane raised. The lanes stop then; the next call starts them again.
        """
        weight = self._weights[index]
        weight.refuse_gradient(x)
        x = weight.checked_input(x, self.compute_device)
        rows = weight.linear.rows
        out = x.new_empty(*x.shape[:-1], rows)
        if x.numel() == 0:
            return out
        flat, flat_out = x.detach().reshape(-1, x.shape[-1]), out.view(-1, rows)
        phase = self._plan.request.phase(len(flat))
        with self._stopping_on_errors():
            begins_pass = self._begins_pass(index)
            jobs = self._maker.make_jobs(index, phase)
            start = self._device.now()
            events = [self._submit(job, flat, flat_out[:, job.start : job.stop]) for job in jobs]
            self.record.add_jobs(jobs, phase)
            computed = [e for e, job in zip(events, jobs, strict=True) if job.lane != "link"]
            end = self._device.wait(computed)
            self.record.add_call(phase, begins_pass, start, end)
            return out if bias is None else out.add_(bias)  # `remove` frees the bias

    def _begins_pass(self, index: int) -> bool:
        """Whether a call of linear `index` is the first of a module's call; outside of any module's
        call (AutoChunk's graphs), whether the last pass began with this linear."""
        first = self._maker.first_linear
        return first is None or (first == index and current_thread() not in self._outermost)

    def _submit(self, job: Job, x: Tensor, out: Tensor) -> Event:
        """Submit a job to its lane, with x (n, columns) and out (n, rows of the job)."""
        device, weight = self._device, self._weights[job.linear]
        rows = weight.rows(job.start, job.stop)
        if job.lane == "host":
            weight_rows = weight.transposed(rows)
            return device.compute_on_host("multiply", weight_rows, x, out, rows.nbytes)
        if job.slab is None:
            resident = weight.transposed(self._resident[job.linear])
            return device.compute(partial(multiply, resident, x, out), rows.nbytes, None)
        slab_rows = _view_as(rows, self._slabs[job.slab])
        after = self._slab_events.get(job.slab)
        if job.lane == "link":
            pinned = _view_as(rows, self._pinned[job.slab]) if self._pinned else None
            event = device.copy(rows, pinned, slab_rows, after)
        else:
            run = partial(multiply, weight.transposed(slab_rows), x, out)
            event = device.compute(run, rows.nbytes, after)
        self._slab_events[job.slab] = event
        return event

    def lookup(self, index: int, ids: Tensor) -> Tensor:
        """Rows `ids` (...) of weight `index`, which is also an embedding: (..., columns)."""
        weight = self._weights[index]
        weight.refuse_gradient(ids)
        out = weight.tensor.new_empty(*ids.shape, weight.linear.columns, device=ids.device)
        with self._stopping_on_errors():
            event = self._device.compute_on_host("look_up", weight.tensor, ids, out, out.nbytes)
            self._device.wait([event])
        return out


def _view_as(rows: Tensor, memory: Tensor) -> Tensor:
    """The first bytes of `memory` (nbytes,) uint8, with the dtype and shape of `rows`."""
    return memory[: rows.nbytes].view(rows.dtype).view(rows.shape)


class Record:
    """Counts bytes and predicted seconds of jobs, and keeps when calls begin and end.

    A pass of the model is from the start of its first split linear to the end of its last.
    """

    def __init__(self, plan: Plan, device: Device) -> None:
        self._plan, self._device, self._busy = plan, device, device.busy_seconds
        # The latest passes: phase, and start and end of every call: [start, end, start, end, ...].
        self._passes: deque[tuple[Phase, list[Moment]]] = deque(maxlen=PASSES_KEPT)
        self._num_passes: Counter[Phase] = Counter()  # of all passes
        self._start: Moment = None  # of the first pass
        self._bytes: dict[str, int] = dict.fromkeys(LANE_NAMES, 0)
        self._predicted: dict[str, float] = dict.fromkeys(LANE_NAMES, 0.0)

    def add_jobs(self, jobs: Sequence[Job], phase: Phase) -> None:
        """Count jobs that were submitted to the lanes."""
        for job in jobs:
            self._bytes[job.lane] += self._plan.bytes_of(job)
            self._predicted[job.lane] += self._plan.seconds_of(job, phase)

    def add_call(self, phase: Phase, begins_pass: bool, start: Moment, end: Moment) -> None:
        """Keep a call's start and end."""
        if begins_pass or not self._passes:
            # Before the pass is there, which another thread may report.
            self._start = start if self._start is None else self._start
            self._passes.append((phase, [start, end]))
            self._num_passes[phase] += 1
        else:
            self._passes[-1][1].extend((start, end))

    def report(self) -> dict:
        """The result of `Handle.report`."""
        self._device.check()
        wall_seconds = 0.0
        if self._passes:
            wall_seconds = self._device.seconds(self._start, self._passes[-1][1][-1])
        lanes = {}
        for name in LANE_NAMES:
            busy_seconds = float(self._busy.get(name, 0.0))  # 0 for a lane that is no thread
            lanes[name] = {
                "busy_seconds": busy_seconds,
                "predicted_busy_seconds": self._predicted[name],
                "idle_seconds": max(0.0, wall_seconds - busy_seconds),
                "bytes": self._bytes[name],
            }
        phases = {phase: self._phase_report(phase) for phase in PHASES}
        return {"fits": False, **phases, "lanes": lanes}

    def _phase_report(self, phase: Phase) -> dict[str, float | None]:
        plan, seconds = self._plan, self._device.seconds
        kept = list(self._passes)  # another thread may add to them meanwhile
        passes = [moments for pass_phase, moments in kept if pass_phase == phase]
        pass_seconds = [seconds(moments[0], moments[-1]) for moments in passes]
        # From the end of one call to the start of the next.
        gaps = [list(map(seconds, moments[1::2], moments[2::2])) for moments in passes]
        call_seconds = [fmean(gaps_of_pass) for gaps_of_pass in gaps if gaps_of_pass]
        return {
            "passes": self._num_passes[phase],
            "measured_seconds": median(pass_seconds) if pass_seconds else None,
            "predicted_seconds": plan.decode_seconds if phase == "decode" else plan.prefill_seconds,
            "call_seconds": median(call_seconds) if call_seconds else None,
        }
