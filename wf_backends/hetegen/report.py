"""What the lanes did, beside what the plan expected."""

from __future__ import annotations

from statistics import median

from wf_backends.hetegen.plan import PHASES, Plan
from wf_backends.hetegen.runner import Runner
from wf_backends.hetegen.simulated import LANES


def report(plan: Plan, runner: Runner | None) -> dict:
    """Plain data.

        phase -> {"passes", "measured_seconds" (median), "predicted_seconds"}
        "lanes" -> lane -> {"busy_seconds", "predicted_busy_seconds", "idle_seconds", "bytes"}

    idle: of the time from the first pass to the end of the last. Nothing is measured where
    everything is resident.
    """
    told: dict = {"fits": plan.fits}
    if runner is None:
        return told
    passes = list(runner.passes)
    predicted = {"decode": plan.decode_seconds, "prefill": plan.prefill_seconds}
    for phase in PHASES:
        took = [each.end - each.start for each in passes if each.phase == phase]
        told[phase] = {
            "passes": len(took),
            "measured_seconds": median(took) if took else None,
            "predicted_seconds": predicted[phase],
        }
    wall = passes[-1].end - passes[0].start if passes else 0.0
    told["lanes"] = {name: _lane(runner, name, wall) for name in LANES}
    return told


def _lane(runner: Runner, name: str, wall: float) -> dict[str, float]:
    lane = runner.lane(name)
    return {
        "busy_seconds": lane.busy_seconds,
        "predicted_busy_seconds": runner.predicted_seconds[name],
        "idle_seconds": max(0.0, wall - lane.busy_seconds),
        "bytes": lane.nbytes,
    }
