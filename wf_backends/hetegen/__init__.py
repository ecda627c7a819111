"""HeteGen (arXiv 2403.01164): inference in which the host computes its share of every linear."""

from wf_backends.hetegen.dispatch import Handle, dispatch_model
from wf_backends.hetegen.law import Rates
from wf_backends.hetegen.plan import Plan
from wf_backends.hetegen.shaped import ShapedDevice

__all__ = ["Handle", "Plan", "Rates", "ShapedDevice", "dispatch_model"]
