"""The layout tracker: a model written for one device, switched where a stage needs it."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.dsp.stage_models import (
    DIMS,
    ORDERS,
    Mix,
    Model,
    drawn_input,
    filled,
    stages_of,
    step_on_one_device,
    step_under_tracker,
)
from tests.helpers import run_threads
from wf_backends.dsp.layout_tracker import LayoutTracker
from wf_backends.dsp.stages import Stages
from wf_backends.dsp.switch import DynamicSequenceParallel
from wf_backends.parallel.gradients import GradientMean


@pytest.mark.parametrize("num_ranks", (1, 2, 3, 4, 6, 8))
@pytest.mark.parametrize(("order", "switches"), ORDERS, ids=["-".join(o) for o, _ in ORDERS])
@pytest.mark.parametrize("checkpointed", (False, True))
def test_a_step_is_exact_with_the_fewest_switches(num_ranks, order, switches, checkpointed):
    expected_out, expected_grads = step_on_one_device(order)
    results = run_threads(num_ranks, step_under_tracker, order, checkpointed)
    for out, grads, num_switches in results:
        assert (out - expected_out).abs().max() < 1e-10
        assert num_switches == switches
        for grad, expected in zip(grads, expected_grads, strict=True):
            assert (grad - expected).abs().max() < 1e-10


class SharedStages(nn.Module):
    """Each of its two stages is called three times, and recomputed in the backward."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)
        self.columns, self.rows = Mix(DIMS["columns"]), Mix(DIMS["rows"])

    def forward(self, x):
        x = self.first(x)
        for stage in (self.columns, self.rows, self.columns, self.rows, self.rows, self.columns):
            x = checkpoint(stage, x, use_reentrant=False)
        return self.last(x).sin()


SHARED_STAGES = Stages(
    dims=DIMS,
    enters="columns",
    starts_along="rows",
    leaves="last",
    needs={"columns": "columns", "rows": "rows"},
)


def gradients_of_forwards(model, shapes, order=()):
    """Gradients after a forward on an input of each (rows, columns) and one backward of all, or in
    an order of forwards (i) and their backwards (~i)."""
    random = torch.Generator().manual_seed(1)
    inputs = [torch.randn(2, *shape, 3, 3, generator=random).double() for shape in shapes]
    if not order:
        sum(model(x).square().mean() for x in inputs).backward()
    losses = {}
    for i in order:
        if i >= 0:
            losses[i] = model(inputs[i]).square().mean()
        else:
            losses[~i].backward()
    return [p.grad for p in model.parameters()]


def tracked_gradients_of_forwards(comm, shapes, order=(), model=SharedStages):
    model = filled(model())
    LayoutTracker(model, DynamicSequenceParallel(comm, gradients="averaged"), SHARED_STAGES)
    gradients_of_forwards(model, shapes, order)
    GradientMean(comm)(model.parameters())
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("num_ranks", (1, 2, 3, 4))
@pytest.mark.parametrize(
    "shapes", [[(5, 7)], [(5, 7), (6, 9)], [(4, 8), (4, 8), (9, 2)], [(8, 4), (4, 8)]], ids=str
)
def test_a_recomputed_stage_gets_the_shard_of_its_forward(num_ranks, shapes):
    """Also where a module is called several times, and forwards of several sizes wait for one
    backward: on two ranks (8, 4) cut along rows and (4, 8) cut along columns have one shape."""
    expected = gradients_of_forwards(filled(SharedStages()), shapes)
    for grads in run_threads(num_ranks, tracked_gradients_of_forwards, shapes):
        for grad, expected_grad in zip(grads, expected, strict=True):
            assert (grad - expected_grad).abs().max() < 1e-10


class CheckpointedWhole(SharedStages):
    """One checkpoint around all of these: in its forward nothing there has a graph."""

    def forward(self, x):
        return checkpoint(self.body, self.first(x), use_reentrant=True).sin()

    def body(self, x):
        for stage in (self.columns, self.rows, self.columns):
            x = stage(x)
        return self.last(x)


class InAnObject(SharedStages):
    def forward(self, x):
        return SimpleNamespace(square=super().forward(x).square)


@pytest.mark.parametrize("model", (SharedStages, CheckpointedWhole, InAnObject))
@pytest.mark.parametrize("order", [(0, 1, ~1, 2, ~0, ~2), (0, 1, ~0, ~1), (0, 2, 1, ~1, ~2, ~0)])
def test_a_backward_gets_the_shards_of_its_own_forward_whatever_ran_since(model, order):
    shapes = [(8, 4), (6, 9), (4, 8)]
    expected = gradients_of_forwards(filled(model()), shapes, order)
    for grads in run_threads(2, tracked_gradients_of_forwards, shapes, order, model):
        for grad, expected_grad in zip(grads, expected, strict=True):
            assert (grad - expected_grad).abs().max() < 1e-10


def test_a_stage_that_got_one_shape_by_two_cuts_of_one_forward_is_refused():
    """Of one row and one column, the second of two ranks has both, however they are cut."""
    with pytest.raises(ValueError, match=r"'columns' runs outside .* \[1, 1, 3\], .* with 2 cuts"):
        run_threads(2, tracked_gradients_of_forwards, [(1, 1)])


class Scaled(Mix):
    """A stage with a module inside that does not get the hidden state."""

    def __init__(self, dim):
        super().__init__(dim)
        self.scale = nn.Linear(1, 3)

    def forward(self, x, scale=1.0):
        return super().forward(x, self.scale(x.new_ones(2, 1)).mean())


def gradients_of_scaled(comm=None):
    model = Model(("columns", "rows"), checkpointed=True)
    model.stages = nn.ModuleList(Scaled(DIMS[dim]) for dim in ("columns", "rows"))
    filled(model)
    if comm is not None:
        needs = {"stages.0*": "columns", "stages.1*": "rows"}  # also stages.0.scale
        dsp = DynamicSequenceParallel(comm, gradients="averaged")
        LayoutTracker(model, dsp, stages_of(("columns", "rows"), needs=needs))
    model(drawn_input()).square().mean().backward()
    if comm is not None:
        GradientMean(comm)(model.parameters())
    return [p.grad for p in model.parameters()]


def test_a_pattern_that_also_matches_what_a_stage_consists_of_names_the_stage():
    expected = gradients_of_scaled()
    for grads in run_threads(2, gradients_of_scaled):
        for grad, expected_grad in zip(grads, expected, strict=True):
            assert (grad - expected_grad).abs().max() < 1e-10


class Flattening(nn.Module):
    """Its second stage gets all that is behind the rows as one dimension."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)
        self.columns, self.flat = Mix(DIMS["columns"]), nn.Linear(63, 63)

    def forward(self, x):
        x = checkpoint(self.columns, self.first(x), use_reentrant=False)
        return self.last(checkpoint(self.flat, x.flatten(2), use_reentrant=False).view_as(x)).sin()


def gradients_of_flattening(comm=None):
    model = filled(Flattening())
    if comm is not None:
        needs = {"columns": "columns", "flat": "columns"}
        stages = Stages(
            dims=DIMS, enters="columns", starts_along="rows", leaves="last", needs=needs
        )
        LayoutTracker(model, DynamicSequenceParallel(comm, gradients="averaged"), stages)
    model(drawn_input()).square().mean().backward()
    if comm is not None:
        GradientMean(comm)(model.parameters())
    return [p.grad for p in model.parameters()]


def test_a_stage_may_get_whole_dimensions_as_one_also_when_it_runs_again():
    expected = gradients_of_flattening()
    for grads in run_threads(2, gradients_of_flattening):
        for grad, expected_grad in zip(grads, expected, strict=True):
            assert (grad - expected_grad).abs().max() < 1e-10


def test_a_forward_without_gradients_leaves_nothing_for_a_later_backward():
    """10 rows and 9 rows are both 4 or 5 on a rank."""

    def gradients(comm):
        model = filled(SharedStages())
        LayoutTracker(model, DynamicSequenceParallel(comm, gradients="averaged"), SHARED_STAGES)
        with torch.no_grad():
            model(torch.ones(2, 10, 7, 3, 3).double())
        gradients_of_forwards(model, [(9, 7)])
        GradientMean(comm)(model.parameters())
        return [p.grad for p in model.parameters()]

    expected = gradients_of_forwards(filled(SharedStages()), [(9, 7)])
    for grads in run_threads(4, gradients):
        for grad, expected_grad in zip(grads, expected, strict=True):
            assert (grad - expected_grad).abs().max() < 1e-10


def test_a_copy_of_the_model_runs_over_the_same_ranks():
    """As an average of weights; also when the model itself does no more."""
    order = ("rows", "columns")

    def outputs(comm):
        model = filled(Model(order))
        dsp = DynamicSequenceParallel(comm, gradients="averaged")
        tracker, out = LayoutTracker(model, dsp, stages_of(order)), model(drawn_input())
        copy = deepcopy(model)
        tracker.remove()
        return out, copy(drawn_input()), tracker.switches

    for out, out_of_copy, switches in run_threads(2, outputs):
        assert torch.equal(out, out_of_copy)
        assert switches == 2  # one in each forward


def test_remove_restores_the_hooks_of_the_model():
    model = filled(Model(("rows",)))
    dsp = DynamicSequenceParallel(gradients="averaged")
    before = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    LayoutTracker(model, dsp, stages_of(("rows",))).remove()
    after = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    assert before == after


def test_a_forward_after_a_failed_one_is_right():
    order = ("rows", "columns")

    def fail(*_):
        raise ZeroDivisionError

    def is_equal_after_failure(comm):
        model = filled(Model(order))
        LayoutTracker(model, DynamicSequenceParallel(comm, gradients="averaged"), stages_of(order))
        x = torch.ones(1, 4, 4, 4, 3).double()
        expected = model(x)
        hook = model.last.register_forward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            model(x)
        hook.remove()
        return torch.equal(model(x), expected)

    assert all(run_threads(2, is_equal_after_failure))
