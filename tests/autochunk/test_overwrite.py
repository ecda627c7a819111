"""An input of a region whose memory its output takes: when, when never, and what it saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from tests.autochunk.test_autochunk import ANY, largest_difference, measured_peak, profiled_peak
from wf_backends.autochunk import ChunkPlan, autochunk
from wf_backends.autochunk.lower import lower
from wf_backends.autochunk.region import Region
from wf_backends.autochunk.search import Candidate, candidates_at
from wf_backends.graph import Effects, capture, read_steps


class Lambda(nn.Module):
    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> object:
        return self.function(x)


def attend(x: Tensor) -> Tensor:
    return x + ((x.tanh() @ x.tanh().mT) / 4).softmax(-1) @ x


def wide(x: Tensor) -> Tensor:
    """A residual MLP of 32 times the width: each row of the result needs the same row only."""
    return x + (x.repeat(1, 1, 32).sigmoid().reshape(*x.shape, 32) * 0.1).sum(-1)


def blurred(x: Tensor) -> Tensor:
    """Each row of the result needs the rows beside it, too."""
    return x + nn.functional.avg_pool1d(x.mT.tanh(), 3, stride=1, padding=1).mT


def candidates(function: Callable[[Tensor], object]) -> tuple[fx.Graph, list[Candidate]]:
    """The function's graph and every region of it that overwrites an input."""
    graph = capture(Lambda(function).eval(), (torch.zeros(1, 64, 16),), {}).graph
    steps = read_steps(graph, Effects())
    places = range(len(steps.steps))
    return graph, [c for i in places for c in candidates_at(steps, i) if c.overwritten]


def overwritten(function: Callable[[Tensor], object]) -> set[str]:
    return {c.overwritten.name for c in candidates(function)[1] if c.overwritten}


def test_a_residual_stream_does_not_live_twice() -> None:
    """Of the stream's 64 KiB: the stream, and small slices of an inner value of 2 MiB."""
    model, x = Lambda(lambda x: wide(x + 1)).eval(), torch.randn(1, 1024, 16).double()
    chunked = autochunk(model, (x,), max_slowdown=float("inf"))
    assert [part.overwritten for part in chunked.plan.regions] == ["add"]
    assert chunked.plan.peak == measured_peak(chunked, {"x": x}) < 1.5 * x.nbytes
    with torch.no_grad():
        assert largest_difference(chunked(x), model(x)) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_drawn_models_have_their_outputs_and_their_predicted_peak(dtype: torch.dtype) -> None:
    """Layers in a drawn order, some values of which are read again later or returned."""
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    overwritten = 0
    for seed in range(5):
        draw = torch.Generator().manual_seed(seed)
        picks = torch.randint(4, (4,), generator=draw).tolist()

        def layers(x: Tensor, picks: list[int] = picks) -> tuple[Tensor, ...]:
            x = x + 1
            kept = [x]
            for pick in picks:
                kept += [x] * (pick == 0)
                x = x + kept[-1].flip(1) if pick == 0 else (attend, wide, blurred)[pick - 1](x)
            return x, kept[-1]

        model, x = Lambda(layers).eval(), torch.randn(1, 128, 16, generator=draw, dtype=dtype)
        before = x.clone()
        chunked = autochunk(model, (x,), max_slowdown=float("inf"))
        with torch.no_grad():
            assert largest_difference(chunked(x), model(x)) <= tolerance, picks
        assert torch.equal(x, before)
        assert chunked.plan.peak == pytest.approx(measured_peak(chunked, {"x": x}), rel=0.05)
        overwritten += sum(bool(part.overwritten) for part in chunked.plan.regions)
    assert overwritten >= 3


LEGAL: dict[str, Callable[[Tensor], object]] = {
    "attention": lambda x: attend(x + 1),
    "an MLP": lambda x: wide(x + 1),
    "rows beside": lambda x: blurred(x + 1),
    "other rows": lambda x: (y := x + 1, y + wide(y.flip(1)))[1],
    "a square that is turned": lambda x: (y := x[:, :16] + 1, y + (y @ y).sigmoid().mT)[1],
    "a reader that waits for the region": lambda x: (
        y := x + 1,
        h := y.sigmoid(),
        h + y,
        y + (h.repeat(1, 1, 8) * 0.1)[..., 16:32],
    )[2:],
    "a view and its base": lambda x: (y := x + 1, y + wide(y.view(1, 16, 64)[..., :16]).sum(1))[1],
}


@pytest.mark.parametrize("what", LEGAL)
def test_every_region_that_overwrites_computes_what_the_model_does(what: str) -> None:
    """Each alone, in slices."""
    model, x = Lambda(LEGAL[what]).eval(), torch.randn(1, 64, 16).double()
    graph, found = candidates(LEGAL[what])
    assert found
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    for candidate in found:
        region = Region(candidate.flow, 20 * candidate.flow.alignment, candidate.overwritten)
        window = nodes[candidate.lo : candidate.hi + 1]
        ours = lower(graph, [(window, region)], Effects()).module(x)
        theirs = pytree.tree_leaves(model(x))
        torch.testing.assert_close(list(ours), theirs, rtol=1e-12, atol=1e-12)


NEVER: dict[str, Callable[[Tensor], object]] = {
    "an input of the model": lambda x: wide(x),
    "a view of an input of the model": lambda x: wide(x.view(1, 16, 64).view(1, 64, 16)),
    "what is read later": lambda x: (add := x + 1, wide(add), add.sum())[1:],
    "what a view reads later": lambda x: (add := x + 1, add.view(-1), wide(add), add[0, 0] * 2)[2:],
    "what the model returns": lambda x: (add := x + 1, wide(add)),
    "of which a view is returned": lambda x: (add := x + 1, add.view(-1), wide(add))[1:],
    "what may be a view of an input": lambda x: wide(x.mT.contiguous()),
    "what may have a view that is read later": lambda x: (
        add := x + 1,
        add.mT.contiguous(),
        wide(add),
        add.numel(),
    )[1:],
}


@pytest.mark.parametrize("what", NEVER)
def test_what_is_never_overwritten(what: str) -> None:
    assert not {"x", "view", "view_1", "add", "contiguous"} & overwritten(NEVER[what])
    model, x = Lambda(NEVER[what]).eval(), torch.randn(1, 64, 16)
    before = x.clone()
    chunked = autochunk(model, (x,), max_slowdown=float("inf"))
    with torch.no_grad():
        assert largest_difference(chunked(x), model(x)) < 1e-5
    assert torch.equal(x, before)


def test_a_buffer_keeps_its_values() -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(1, 256, 16))

        def forward(self, x: Tensor) -> Tensor:
            return wide(self.table) + x

    model, x = Embedded().eval(), torch.randn(1, 256, 16)
    before = model.get_buffer("table").clone()
    chunked = autochunk(model, (x,), max_slowdown=float("inf"))
    assert chunked.plan.regions
    with torch.no_grad():
        assert largest_difference(chunked(x), model(x)) < 1e-5
    assert torch.equal(model.get_buffer("table"), before)


def test_a_plan_says_what_is_overwritten_and_is_obeyed() -> None:
    model, x = Lambda(lambda x: wide(wide(x + 1))).eval(), torch.randn(1, 512, 16)
    plan = autochunk(model, (x,), max_slowdown=ANY).plan
    assert isinstance(plan, ChunkPlan)
    again = autochunk(model, (x,), plan=ChunkPlan.from_json(plan.to_json()))
    assert again.plan == plan and measured_peak(again, {"x": x}) == plan.peak
    assert f"over {plan.regions[0].overwritten}" in again.explain()

    apart = replace(plan, regions=tuple(replace(p, overwritten="") for p in plan.regions))
    assert measured_peak(autochunk(model, (x,), plan=apart), {"x": x}) > plan.peak
    wrong = replace(plan, regions=(replace(plan.regions[0], overwritten="x"),))
    with pytest.raises(ValueError, match="may not overwrite x"):
        autochunk(model, (x,), plan=wrong)


def test_inputs_that_need_gradients_run_the_model_unchunked() -> None:
    model, x = Lambda(lambda x: wide(x + 1)).eval(), torch.randn(1, 512, 16, requires_grad=True)
    chunked = autochunk(model, (x.detach(),), max_slowdown=ANY)
    assert any(part.overwritten for part in chunked.plan.regions)
    with pytest.warns(UserWarning, match="gradients are enabled: the model runs unchunked"):
        chunked(x).sum().backward()
    assert x.grad is not None


def test_torch_compile_overwrites_too() -> None:
    model, x = Lambda(lambda x: attend(x + 1)).eval(), torch.randn(1, 1024, 16)
    chunked = autochunk(model, (x,), max_memory=0.3, max_slowdown=ANY)
    assert any(part.overwritten for part in chunked.plan.regions)
    compiled = torch.compile(chunked)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        assert profiled_peak(lambda: compiled(x)) <= 1.05 * chunked.plan.peak
