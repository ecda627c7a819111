"""Plans that split weights by rows over an accelerator and its host. Pure: no torch."""

from wf_backends.hetegen.weights.jobs import JobMaker
from wf_backends.hetegen.weights.law import Rates, best_alpha, seconds_per_byte
from wf_backends.hetegen.weights.plan import (
    LANE_NAMES,
    PHASES,
    Job,
    Linear,
    Phase,
    Plan,
    Request,
)
from wf_backends.hetegen.weights.planning import make_plan

__all__ = [
    "LANE_NAMES",
    "PHASES",
    "Job",
    "JobMaker",
    "Linear",
    "Phase",
    "Plan",
    "Rates",
    "Request",
    "best_alpha",
    "make_plan",
    "seconds_per_byte",
]
