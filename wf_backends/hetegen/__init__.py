"""HeteGen (arXiv 2403.01164): inference in which the host computes its share of every linear."""

from wf_backends.hetegen.accelerator import Accelerator
from wf_backends.hetegen.device import ShapedDevice
from wf_backends.hetegen.dispatch import Handle, dispatch_model
from wf_backends.hetegen.measure import measure_machine
from wf_backends.hetegen.weights import Plan, Rates, best_alpha, seconds_per_byte

__all__ = [
    "Accelerator",
    "Handle",
    "Plan",
    "Rates",
    "ShapedDevice",
    "best_alpha",
    "dispatch_model",
    "measure_machine",
    "seconds_per_byte",
]
