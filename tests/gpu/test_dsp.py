"""DSP on ranks that share one GPU: states are cut, switched and gathered without a changed bit."""

from __future__ import annotations

import pytest
import torch

from tests.dsp.stage_models import (
    ORDERS,
    Model,
    drawn_input,
    filled,
    stages_of,
    step_on_one_device,
)
from tests.gpu.ranks_on_gpu import DEVICE
from tests.helpers import run_threads
from wf_backends.comm import Communicator
from wf_backends.dsp.layout_tracker import LayoutTracker
from wf_backends.dsp.switch import DynamicSequenceParallel
from wf_backends.parallel.gradients import GradientMean

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_a_state_that_is_cut_switched_and_gathered_has_the_same_bits(
    size: int, dtype: torch.dtype
) -> None:
    """Neither length is a multiple of the ranks. The gradient of sum(x w) is w."""
    random = torch.Generator().manual_seed(0)
    x, w = (torch.randn(2, 301, 67, 32, generator=random).to(DEVICE, dtype) for _ in range(2))

    def rank(comm: Communicator) -> tuple[bool, bool]:
        dsp, leaf = DynamicSequenceParallel(comm), x.clone().requires_grad_()
        with torch.autograd.set_multithreading_enabled(False):
            held = dsp.split(leaf, 1)
            held = dsp.switch(dsp.switch(held, 1, 2), 2, 1)
            out = dsp.gather(held, held.dim)
            (grad,) = torch.autograd.grad((out * w).sum(), leaf)
        return torch.equal(out, x), torch.equal(grad, w)

    assert run_threads(size, rank) == [(True, True)] * size


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    ("order", "switches"), ORDERS[:3], ids=["-".join(o) for o, _ in ORDERS[:3]]
)
def test_a_step_of_a_model_with_three_dimensions_is_exact(order, switches, checkpointed) -> None:
    """Switched by the tracker; gradients are the mean over the ranks."""
    expected_out, expected_grads = step_on_one_device(order)

    def rank(comm: Communicator):
        model, x = filled(Model(order, checkpointed)).to(DEVICE), drawn_input().to(DEVICE)
        dsp = DynamicSequenceParallel(comm, gradients="averaged")
        tracker = LayoutTracker(model, dsp, stages_of(order))
        with torch.autograd.set_multithreading_enabled(False):
            out = model(x)
            out.square().mean().backward()
        GradientMean(comm)(model.parameters())
        return out.detach().cpu(), [p.grad.cpu() for p in model.parameters()], tracker.switches

    for out, grads, num_switches in run_threads(4, rank):
        assert (out - expected_out).abs().max() < 1e-10
        assert num_switches == switches
        for grad, expected in zip(grads, expected_grads, strict=True):
            assert (grad - expected).abs().max() < 1e-10
