"""The layout tracker: a model that knows nothing of ranks, switched where a stage needs it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.helpers import run_threads
from wf_backends.dsp.stages import LayoutTracker, Stages
from wf_backends.dsp.switch import DynamicSequenceParallel
from wf_backends.parallel.gradients import GradientMean

DIMS = {"rows": 1, "columns": 2, "layers": 3}


class Mix(nn.Module):
    """A residual stage that needs one dimension of (b, rows, columns, layers, 3) whole."""

    def __init__(self, dim):
        super().__init__()
        self.dim, self.linear = dim, nn.Linear(3, 3)

    def forward(self, x, scale=1.0):
        return x + scale * (self.linear(x).cumsum(self.dim) / x.shape[self.dim]).tanh()


class Model(nn.Module):
    def __init__(self, order, checkpointed=False):
        super().__init__()
        self.checkpointed = checkpointed
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)
        self.stages = nn.ModuleList(Mix(DIMS[name]) for name in order)

    def forward(self, x):
        x = self.first(x)
        for stage in self.stages:
            if self.checkpointed:
                x = checkpoint(stage, x, use_reentrant=False)
            else:
                x = stage(x, scale=1.0)
        return self.last(x).sin()


def stages(order, **words):
    needs = {f"stages.{at}": name for at, name in enumerate(order)}
    start = next(name for name in DIMS if name != order[0]) if order else None
    basic = {"dims": DIMS, "enters": "stages.0", "starts_along": start, "leaves": "last"}
    return Stages(**{**basic, "needs": needs, **words})


def filled(model):
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=random, dtype=p.dtype))
    return model.double()


def step(comm, order, checkpointed):
    """Output, gradients and switches of a step; on one rank without a tracker."""
    model = filled(Model(order, checkpointed))
    x = torch.randn(2, 5, 7, 3, 3, generator=torch.Generator().manual_seed(1)).double()
    if comm is None:
        out = model(x)
        out.square().mean().backward()
        return out, [p.grad for p in model.parameters()], 0
    dsp = DynamicSequenceParallel(comm, gradients="averaged")
    with LayoutTracker(model, dsp, stages(order)) as tracker:
        for _ in range(2):  # nothing of the first pass is left over in the second
            model.zero_grad()
            out = model(x)
            out.square().mean().backward()
    GradientMean(comm)(model.parameters())
    return out, [p.grad for p in model.parameters()], tracker.switches / 2


ORDERS = [
    (("rows", "columns", "rows", "columns"), 3),
    (("rows", "rows", "columns", "columns", "layers"), 1),
    (("layers", "columns", "rows"), 1),
    (("columns", "columns", "columns"), 0),
]


@pytest.mark.parametrize("num_ranks", (1, 2, 3, 4, 6, 8))
@pytest.mark.parametrize(("order", "switches"), ORDERS)
@pytest.mark.parametrize("checkpointed", (False, True))
def test_exact_with_as_few_switches_as_there_are_conflicts(
    num_ranks, order, switches, checkpointed
):
    right, grads, _ = step(None, order, False)
    for out, found, counted in run_threads(num_ranks, step, order, checkpointed):
        assert (out - right).abs().max() < 1e-10 and counted == switches
        for mine, wanted in zip(found, grads, strict=True):
            assert (mine - wanted).abs().max() < 1e-10


class Twice(nn.Module):
    """A stage that is called before and after another, recomputed in the backward."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)
        self.columns, self.rows = Mix(DIMS["columns"]), Mix(DIMS["rows"])

    def forward(self, x):
        x = self.first(x)
        for stage in (self.columns, self.rows, self.columns, self.rows, self.rows, self.columns):
            x = checkpoint(stage, x, use_reentrant=False)
        return self.last(x).sin()


def twice(comm, shapes):
    """Gradients of one backward after a forward of every shape."""
    model = filled(Twice())
    words = {"needs": {"columns": "columns", "rows": "rows"}, "enters": "columns"}
    tracker = None
    if comm is not None:
        dsp = DynamicSequenceParallel(comm, gradients="averaged")
        tracker = LayoutTracker(model, dsp, stages((), starts_along="rows", **words))
    random = torch.Generator().manual_seed(1)
    drawn = [torch.randn(2, *shape, 3, 3, generator=random).double() for shape in shapes]
    sum(model(x).square().mean() for x in drawn).backward()
    if tracker is not None:
        GradientMean(comm)(model.parameters())
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("num_ranks", (1, 2, 3, 4))
@pytest.mark.parametrize("shapes", [[(5, 7)], [(5, 7), (6, 9)], [(4, 8), (4, 8), (9, 2)]])
def test_stages_that_run_again_get_what_they_got(num_ranks, shapes):
    """A module called twice, and forwards of several sizes before one backward."""
    wanted = twice(None, shapes)
    for found in run_threads(num_ranks, twice, shapes):
        for mine, right in zip(found, wanted, strict=True):
            assert (mine - right).abs().max() < 1e-10


def test_a_stage_that_may_have_got_either_is_refused():
    """Two sizes whose shards look the same: (8, 4) along rows and (4, 8) along columns."""
    with pytest.raises(ValueError, match="'rows' runs again .* hidden state \\[4, 4, 3\\]"):
        run_threads(2, twice, [(8, 4), (4, 8)])


def test_a_removed_tracker_leaves_the_model_as_it_was():
    model = filled(Model(("rows",)))
    dsp = DynamicSequenceParallel(gradients="averaged")
    before = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    LayoutTracker(model, dsp, stages(("rows",))).remove()
    after = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    assert before == after


def test_a_failed_forward_leaves_no_state():
    def one_rank(comm):
        model = filled(Model(("rows", "columns")))
        LayoutTracker(
            model,
            DynamicSequenceParallel(comm, gradients="averaged"),
            stages(("rows", "columns")),
        )
        x = torch.ones(1, 4, 4, 4, 3).double()
        right = model(x)
        handle = model.last.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(x)
        handle.remove()
        return torch.equal(model(x), right)

    assert all(run_threads(2, one_rank))


def refused(words, order=("rows", "columns"), gradients="averaged", x=None):
    def one_rank(comm):
        dsp = DynamicSequenceParallel(comm, gradients=gradients)
        model = filled(Model(order))
        LayoutTracker(model, dsp, stages(order, **words))
        return model(torch.zeros(1, 4, 4, 4, 3).double() if x is None else x)

    with pytest.raises(ValueError) as refusal:
        run_threads(2, one_rank)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"starts_along": "row"}, "starts_along must be one of ['rows', 'columns', 'layers']"),
        ({"needs": {"stages.0": "colums"}}, "did you mean 'columns'"),
        ({"needs": {"stage.*": "rows"}}, "'stage.*' matches no module"),
        ({"needs": {"stages.?": "rows", "stages.1": "columns"}}, "'stages.1' needs 'rows' and"),
        ({"dims": {"rows": 1}, "starts_along": "rows"}, "at least two dimensions"),
        ({"enters": "stages.9"}, "no module 'stages.9'"),
        ({"leaves": ""}, "no module ''"),
        ({"enters": "stages.1"}, "'stages.0' runs before 'stages.1'"),
        ({"leaves": "first"}, "'first' ran before 'stages.0'"),
        ({"dims": DIMS | {"layers": 5}}, "do not fit the hidden state (1, 4, 4, 4, 3)"),
    ],
)
def test_bad_words_are_refused_by_name(words, says):
    order = ("rows", "columns")
    if "needs" not in words and words.get("dims", DIMS) != DIMS and len(words["dims"]) == 1:
        words = words | {"needs": {"stages.0": "rows"}}
    assert says in refused(words, order)


def test_gradients_that_are_not_averaged_are_refused():
    assert "must have gradients=\"averaged\", got 'whole'" in refused({}, gradients="whole")


def test_a_hidden_state_of_another_length_is_refused():
    class Shrinks(Mix):
        def forward(self, x, scale=1.0):
            return x[:, :1]

    def one_rank(comm):
        model = Model(("rows", "rows", "columns"))
        model.stages[0] = Shrinks(1)
        dsp = DynamicSequenceParallel(comm, gradients="averaged")
        LayoutTracker(model, dsp, stages(("rows", "rows", "columns")))
        model(torch.zeros(1, 4, 4, 4, 3))

    with pytest.raises(ValueError, match="'stages.2' got a hidden state with .*'rows': 1"):
        run_threads(2, one_rank)


def test_a_stage_without_a_hidden_state_is_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    words = Stages(dims={"a": 0, "b": 1}, enters="0", starts_along="a", leaves="1")
    LayoutTracker(model, DynamicSequenceParallel(gradients="averaged"), words)
    with pytest.raises(ValueError, match="0 must get the hidden state as its first argument"):
        model(input=None)
