"""What `Handle.report` tells: passes of a model, and what the lanes did for them."""

from __future__ import annotations

from collections import Counter, deque
from statistics import fmean, median

from wf_backends.hetegen.device import Device, Moment
from wf_backends.hetegen.plan import LANE_NAMES, PHASES, Job, LaneName, Phase, Plan

PASSES_KEPT = 256


class Record:
    """What the lanes of a device are asked for, and when calls of split linears begin and end.

    A pass of the model is from the jobs of its first split linear to the end of its last.
    """

    def __init__(self, plan: Plan, device: Device) -> None:
        self._plan, self._device = plan, device
        # Phase; when each call began and ended, in turns. The latest passes; all are counted.
        self._passes: deque[tuple[Phase, list[Moment]]] = deque(maxlen=PASSES_KEPT)
        self._num_passes: Counter[Phase] = Counter()
        self._began: Moment = None
        self._bytes: dict[str, int] = dict.fromkeys(LANE_NAMES, 0)
        self._predicted: dict[str, float] = dict.fromkeys(LANE_NAMES, 0.0)
        self._busy_before = self._busy()
        self._busy_at_end: dict[str, float] | None = None

    def begin_call(self, phase: Phase, begins_pass: bool) -> None:
        now = self._device.now()
        if begins_pass or not self._passes:
            self._passes.append((phase, []))
            self._num_passes[phase] += 1
            self._began = now if self._began is None else self._began
        self._passes[-1][1].append(now)

    def ask(self, job: Job, phase: Phase) -> None:
        """Its lane is asked for a job."""
        self._bytes[job.lane] += self._plan.bytes_of(job)
        self._predicted[job.lane] += self._plan.seconds_of(job, phase)

    def end_call(self, moment: Moment) -> None:
        self._passes[-1][1].append(moment)

    def end(self) -> None:
        """The report stays as it is, whatever the device does later."""
        self._busy_at_end = self._busy()

    def report(self) -> dict:
        """What `Handle.report` returns."""
        between = self._device.seconds
        told: dict = {"fits": False} | {phase: self._phase_report(phase) for phase in PHASES}
        wall = between(self._began, self._passes[-1][1][-1]) if self._passes else 0.0
        busy = self._busy_at_end or self._busy()
        told["lanes"] = {name: self._lane_report(name, busy, wall) for name in LANE_NAMES}
        return told

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

    def _lane_report(self, name: LaneName, busy: dict[str, float], wall: float) -> dict[str, float]:
        seconds = busy[name] - self._busy_before[name]
        return {
            "busy_seconds": seconds,
            "predicted_busy_seconds": self._predicted[name],
            "idle_seconds": max(0.0, wall - seconds),
            "bytes": self._bytes[name],
        }

    def _busy(self) -> dict[str, float]:
        """Lane -> seconds since there is the device; 0 of one that is no thread."""
        return dict.fromkeys(LANE_NAMES, 0.0) | {
            name: lane.busy_seconds for name, lane in self._device.lanes.items()
        }
