"""Running the jobs of a plan on the lanes of a device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from wf_backends.hetegen.device import Device, Event, Lane, Work
from wf_backends.hetegen.jobs import Accel, Copy, Free, Host, Job, Join, Phase
from wf_backends.hetegen.plan import Plan
from wf_backends.hetegen.simulated import LANES, lane_of

PASSES_KEPT = 4096


@dataclass(frozen=True, slots=True)
class HostWeight:
    """A weight in host memory, whose output features are along `dim`.

    (rows, columns) with dim 0, as nn.Linear has it, or (columns, rows) with dim 1, as
    transformers' Conv1D.
    """

    tensor: Tensor
    dim: int

    def rows(self, start: int, stop: int) -> Tensor:
        """A view of some rows."""
        return self.tensor.narrow(self.dim, start, stop - start)

    def multiply(self, x: Tensor, rows: Tensor) -> Tensor:
        """x (n, columns) times some rows: (n, rows)."""
        return F.linear(x, rows) if self.dim == 0 else x @ rows


@dataclass(slots=True)
class Pass:
    """A pass of the model, from its first split linear to the end of its last."""

    phase: Phase
    start: float
    end: float


@dataclass(slots=True)
class Call:
    """One call of a split linear: x (n, columns), out (n, rows), x in host memory."""

    x: Tensor
    out: Tensor
    x_host: Tensor
    x_ready: Sequence[Event]


class Runner:
    """Calls of split linears on a device.

    Args:
        plan: how they are split.
        weights: one for each split of the plan.
        device: has the lanes.
        pinned: memory as large as the slabs, through which copies pass; empty: they do not.

    Attributes:
        passes: the latest.
        predicted_seconds: lane -> what the plan expects of the jobs so far.
    """

    def __init__(
        self,
        plan: Plan,
        weights: Sequence[HostWeight],
        device: Device,
        pinned: Sequence[Tensor],
    ) -> None:
        self._plan, self._weights, self._device = plan, weights, device
        self._slabs = [device.slab(plan.slab_bytes) for _ in range(plan.slabs)]
        self._pinned = pinned
        self._resident = [
            device.resident(weight.rows(0, split.resident)) if split.resident else None
            for split, weight in zip(plan.splits, weights, strict=True)
        ]
        self.passes: deque[Pass] = deque(maxlen=PASSES_KEPT)
        self.predicted_seconds = dict.fromkeys(LANES, 0.0)
        self._restart()

    def _restart(self) -> None:
        """Forget what is in the slabs."""
        self._maker = self._plan.job_maker()
        self._events: dict[int, Event] = {}

    def linear(self, index: int, x: Tensor) -> Tensor:
        """x (..., columns) times the transposed weight `index`: (..., rows).

        Raises:
            NotImplementedError: where a gradient would be needed.
            Exception: what a lane raised. The lanes are stopped then; the next call starts anew.
        """
        if torch.is_grad_enabled() and x.requires_grad:
            raise NotImplementedError(
                "a split linear has no gradient: call the model under torch.no_grad()"
            )
        rows = self._plan.splits[index].linear.rows
        out = x.new_empty(*x.shape[:-1], rows)
        if x.numel() == 0:
            return out
        flat, flat_out = x.detach().reshape(-1, x.shape[-1]), out.view(-1, rows)
        phase = self._plan.phase(len(flat))
        self._begin_pass(index, phase)
        with self._stopping_on_errors():
            jobs = self._maker.call(index, phase)
            on_host = any(isinstance(job, Host) for job in jobs)
            x_host, ready = self._device.to_host(flat) if on_host else (flat, ())
            call = Call(flat, flat_out, x_host, ready)
            for job in jobs:
                self._run(job, phase, call)
        self.passes[-1].end = time.perf_counter()
        oldest = self._maker.oldest
        self._events = {n: event for n, event in self._events.items() if n >= oldest}
        return out

    def lookup(self, table: Tensor, ids: Tensor) -> Tensor:
        """Rows `ids` (...) of a table (n, d) in host memory, on the device: (..., d)."""
        out = table.new_empty(*ids.shape, table.shape[1], device=ids.device)
        with self._stopping_on_errors():
            ids_host, ready = self._device.to_host(ids)

            def run() -> None:
                self._device.from_host(F.embedding(ids_host, table), out)

            nbytes = ids.numel() * table.shape[1] * table.itemsize
            self._device.wait([self._device.host.submit(Work(run, nbytes), ready)])
        return out

    def _begin_pass(self, index: int, phase: Phase) -> None:
        if not self.passes or index == self._maker.first:
            now = time.perf_counter()
            self.passes.append(Pass(phase, now, now))

    @contextmanager
    def _stopping_on_errors(self) -> Iterator[None]:
        """Stop the lanes if the block raises anything, Ctrl-C too."""
        try:
            yield
        except BaseException:
            self.stop()
            raise

    def lane(self, name: str) -> Lane:
        """The device's lane of this name."""
        return {
            "link": self._device.link,
            "host": self._device.host,
            "accelerator": self._device.accelerator,
        }[name]

    def stop(self) -> None:
        """End the lanes, and begin anew with the next call."""
        self._device.stop()
        self._restart()

    def _run(self, job: Job, phase: Phase, call: Call) -> None:
        after = [self._events[number] for number in job.after]
        match job:
            case Join():
                self._device.wait(after)
                return
            case Free():
                self._events[job.number] = after[0]
                return
            case Copy():
                event = self._device.link.submit(self._copy(job), after)
            case Host():
                event = self._device.host.submit(self._compute_on_host(job, call), call.x_ready)
            case Accel():
                event = self._device.accelerator.submit(self._compute(job, call), after)
        self._events[job.number] = event
        self.predicted_seconds[lane_of(job) or ""] += self._plan.seconds_of(job, phase)

    def _copy(self, job: Copy) -> Work:
        source = self._weights[job.linear].rows(job.start, job.stop)
        slab = _shaped(self._slabs[job.slab], source)
        pinned = _shaped(self._pinned[job.slab], source) if self._pinned else None
        return Work(lambda: self._device.copy(source, pinned, slab), source.nbytes)

    def _compute_on_host(self, job: Host, call: Call) -> Work:
        weight = self._weights[job.linear]
        rows, out = weight.rows(job.start, job.stop), call.out[:, job.start : job.stop]

        def run() -> None:
            self._device.from_host(weight.multiply(call.x_host, rows), out)

        return Work(run, rows.nbytes, 2.0 * rows.numel() * len(call.x))

    def _compute(self, job: Accel, call: Call) -> Work:
        weight = self._weights[job.linear]
        source, out = weight.rows(job.start, job.stop), call.out[:, job.start : job.stop]
        if job.slab is None:
            rows = self._resident[job.linear]
            assert rows is not None
        else:
            rows = _shaped(self._slabs[job.slab], source)

        def run() -> None:
            out.copy_(weight.multiply(call.x, rows))

        return Work(run, source.nbytes, 2.0 * source.numel() * len(call.x))


def _shaped(memory: Tensor, rows: Tensor) -> Tensor:
    """The beginning of `memory` as a tensor like `rows`."""
    return memory[: rows.nbytes].view(rows.dtype).view(rows.shape)
