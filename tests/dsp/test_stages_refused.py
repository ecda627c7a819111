"""Stages that do not fit the model, and hidden states that change their length, are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.dsp.stage_models import (
    DIMS,
    Mix,
    Model,
    filled,
    stages_of,
)
from tests.helpers import run_threads
from wf_backends.dsp.layout_tracker import LayoutTracker
from wf_backends.dsp.stages import Stages
from wf_backends.dsp.switch import DynamicSequenceParallel


def message_of_refusal(order=("rows", "columns"), gradients="averaged", **changes):
    """The ValueError of a tracker with changed stages, or of its model's forward."""

    def forward(comm):
        dsp = DynamicSequenceParallel(comm, gradients=gradients)
        model = filled(Model(order))
        LayoutTracker(model, dsp, stages_of(order, **changes))
        return model(torch.zeros(1, 4, 4, 4, 3).double())

    with pytest.raises(ValueError) as refusal:
        run_threads(2, forward)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"starts_along": "row"}, "starts_along must be one of ['rows', 'columns', 'layers']"),
        ({"needs": {"stages.0": "colums"}}, "did you mean 'columns'"),
        ({"needs": {"stage.*": "rows"}}, "'stage.*' matches no module"),
        ({"needs": {"stages.?": "rows", "stages.1": "columns"}}, "'stages.1' needs 'rows' and"),
        (
            {"dims": {"rows": 1}, "starts_along": "rows", "needs": {"stages.0": "rows"}},
            "at least two dimensions",
        ),
        ({"enters": "stages.9"}, "no module 'stages.9'"),
        ({"leaves": ""}, "no module ''"),
        ({"enters": "stages.1"}, "'stages.0' runs before 'stages.1'"),
        ({"leaves": "first"}, "'first' ran before 'stages.0'"),
        ({"dims": DIMS | {"layers": -2}}, "dims must be different numbers, from 0 on"),
        ({"dims": DIMS | {"layers": 1}}, "dims must be different numbers, from 0 on"),
        ({"dims": DIMS | {"layers": 5}}, "do not fit the hidden state (1, 4, 4, 4, 3)"),
    ],
)
def test_stages_that_do_not_fit_the_model_are_refused(changes, message):
    assert message in message_of_refusal(**changes)


def test_gradients_that_are_not_averaged_are_refused():
    message = message_of_refusal(gradients="whole")
    assert "must have gradients=\"averaged\", got 'whole'" in message


def test_a_hidden_state_that_changes_its_length_is_refused():
    order = ("rows", "rows", "columns")

    class Shorten(Mix):
        def forward(self, x, scale=1.0):
            return x[:, :1]

    def forward(comm):
        model = Model(order)
        model.stages[0] = Shorten(1)
        dsp = DynamicSequenceParallel(comm, gradients="averaged")
        LayoutTracker(model, dsp, stages_of(order))
        model(torch.zeros(1, 4, 4, 4, 3))

    with pytest.raises(ValueError, match="'stages.2' got a hidden state with .*'rows': 1"):
        run_threads(2, forward)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda x: x.mean((1, 2, 3)), "'last' got a hidden state with {'rows': 2}, but sharded"),
        (lambda x: (x,), "'last' must return the hidden state, got tuple"),
    ],
)
def test_leaves_that_returns_no_hidden_state_is_refused(returned, message):
    """As a head that takes a mean over all positions."""

    def forward(comm):
        model = Model(("rows",))
        model.last.register_forward_hook(lambda _, __, out: returned(out))
        dsp = DynamicSequenceParallel(comm, gradients="averaged")
        LayoutTracker(model, dsp, stages_of(("rows",)))
        model(torch.zeros(1, 4, 4, 4, 3))

    with pytest.raises(ValueError, match=message):
        run_threads(2, forward)


def test_a_stage_without_a_positional_argument_is_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    stages = Stages(dims={"a": 0, "b": 1}, enters="0", starts_along="a", leaves="1")
    LayoutTracker(model, DynamicSequenceParallel(gradients="averaged"), stages)
    with pytest.raises(ValueError, match="0 must get the hidden state as its first argument"):
        model(input=None)


def test_a_stage_that_one_rank_leaves_out_is_named():
    """As by stochastic depth; without names its switch would be taken for that of a later stage."""
    order = ("rows", "columns", "rows", "columns", "rows")

    def forward(comm):
        model = filled(Model(order))
        dsp = DynamicSequenceParallel(comm, gradients="averaged")
        LayoutTracker(model, dsp, stages_of(order))
        if comm.rank == 1:
            del model.stages[1:3]
        with pytest.raises(ValueError) as refusal:
            model(torch.zeros(1, 4, 4, 4, 3).double())
        return str(refusal.value)

    for text in run_threads(2, forward):
        assert "layer 'stages.1' (ranks [0]), layer 'stages.3' (ranks [1])" in text
