"""Regions on graphs made for the purpose: halos, writes in place, random numbers, walls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.autochunk.test_autochunk import ANY, largest_difference, measured_peak
from wf_backends.autochunk import autochunk
from wf_backends.autochunk.region import Bodies, ChunkedRegion, Region, slice_length
from wf_backends.autochunk.search import candidate_in, candidates_at
from wf_backends.graph.capture import capture
from wf_backends.graph.memory import Effects, read_steps


class Lambda(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, *self.parts)


def chunked_equals(model: nn.Module, x: torch.Tensor, tolerance: float = 1e-12) -> nn.Module:
    model.double().eval()
    chunked = autochunk(model, (x.double(),), max_slowdown=ANY)
    with torch.no_grad():
        assert largest_difference(chunked(x.double()), model(x.double())) <= tolerance
    assert chunked.plan.peak == pytest.approx(measured_peak(chunked, {"x": x.double()}), rel=0.05)
    return chunked


def test_two_convolutions_and_a_group_norm_between_them() -> None:
    def block(x: torch.Tensor, first: nn.Module, norm: nn.Module, last: nn.Module) -> torch.Tensor:
        return last(F.silu(norm(first(x))))

    parts = nn.Conv2d(4, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.Conv2d(16, 4, 3, padding=1)
    chunked = chunked_equals(Lambda(block, *parts), torch.randn(1, 4, 32, 32))
    assert chunked.plan.regions


def test_a_stride_and_an_upsampling_change_the_rows() -> None:
    def down_and_up(x: torch.Tensor, down: nn.Module, wide: nn.Module) -> torch.Tensor:
        return down(F.interpolate(F.relu(wide(x)), scale_factor=2.0)).sum(1, keepdim=True)

    parts = nn.Conv2d(8, 2, 3, stride=2, padding=1), nn.Conv2d(2, 8, 5, padding=2)
    assert chunked_equals(Lambda(down_and_up, *parts), torch.randn(1, 2, 24, 24)).plan.regions


def test_rows_that_no_slice_computes_are_not_lost() -> None:
    """Every second row of `wide` is read by the strided slice, all of them by the sum."""

    def skipping(x: torch.Tensor, wide: nn.Module, down: nn.Module) -> torch.Tensor:
        hidden = torch.tanh(wide(x))
        return down(hidden * 2) + hidden.mean()

    parts = nn.Conv2d(2, 8, 1), nn.Conv2d(8, 2, 1, stride=2)
    chunked_equals(Lambda(skipping, *parts), torch.randn(1, 2, 24, 24))

    def beside(x: torch.Tensor, wide: nn.Module, down: nn.Module) -> torch.Tensor:
        hidden = torch.tanh(wide(x))
        return down(hidden).sum() + hidden

    parts = nn.Conv2d(2, 32, 1), nn.Conv2d(32, 2, 1, stride=2)
    graph = capture(Lambda(beside, *parts).eval(), (torch.randn(1, 2, 24, 24),), {}).graph
    effects = Effects()
    steps = read_steps(graph, effects)
    for candidate in (c for place in range(len(steps.steps)) for c in candidates_at(steps, place)):
        length = slice_length(candidate.flow, 4)
        ChunkedRegion(Region(candidate.flow, length), Bodies(effects))  # or it raises


def test_a_write_in_place_within_a_region() -> None:
    def scores(x: torch.Tensor) -> torch.Tensor:
        weights = x @ x.transpose(-1, -2)
        weights.mul_(0.1).clamp_(max=1)
        return weights.softmax(-1) @ x

    assert chunked_equals(Lambda(scores), torch.randn(2, 64, 8)).plan.regions


def test_a_write_in_place_that_others_read() -> None:
    def shifted(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        first = (y @ y.transpose(-1, -2)).softmax(-1) @ y
        y.add_(1)
        return (y @ y.transpose(-1, -2)).softmax(-1) @ y + first

    chunked_equals(Lambda(shifted), torch.randn(2, 64, 8))


def test_random_numbers_keep_their_place() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        first = (x @ x.transpose(-1, -2)).softmax(-1) @ x
        noise = torch.rand_like(first)
        return (first + noise) * F.dropout(first, 0.5, training=True)

    model, x = Lambda(noisy).eval(), torch.randn(2, 64, 8)
    chunked = autochunk(model, (x,), max_slowdown=ANY)
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    with torch.no_grad():
        assert torch.equal(chunked(x), expected)


def test_an_operator_without_a_rule_is_a_wall_and_is_named() -> None:
    def scores_of_spectra(x: torch.Tensor) -> torch.Tensor:
        y = torch.fft.fft(x).abs()
        return (y @ y.transpose(-1, -2)).softmax(-1) @ y

    chunked = chunked_equals(Lambda(scores_of_spectra), torch.randn(1, 64, 8))
    assert "no rule for it: aten.fft_fft.default (1 times)" in chunked.explain()
    assert chunked.plan.regions


def test_layers_that_are_alike_share_one_region() -> None:
    def layers(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = x + (x @ x.transpose(-1, -2)).softmax(-1) @ x
        return x

    plan = chunked_equals(Lambda(layers), torch.randn(1, 128, 8), 1e-12).plan
    assert len(plan.regions) == 4
    assert len({(r.length, r.operators) for r in plan.regions}) == 1


def test_rows_that_make_one_slice_are_no_region() -> None:
    """XLNet's relative positions: rows are shifted by a reshape of 64 x 128 to 128 x 64 and one of
    127 x 64 to 64 x 127, so that slices would begin at multiples of 128 rows."""

    def shifted(x: torch.Tensor) -> torch.Tensor:
        scores = x @ torch.cat([x, x], 1).transpose(-1, -2)
        moved = scores.view(1, 128, 64)[:, 1:].reshape(1, 64, 127)
        return moved.index_select(2, torch.arange(64)).softmax(-1) @ x

    chunked = chunked_equals(Lambda(shifted), torch.randn(1, 64, 8))
    assert all(part.chunks > 1 for part in chunked.plan.regions)


class Gated(nn.Module):
    """A list of tensors in the middle: what `chunk` returns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, gate = x.repeat(1, 1, 6).chunk(2, dim=-1)
        return a * gate.sigmoid()


def test_no_region_reads_a_list_of_tensors() -> None:
    graph = capture(Gated(), (torch.randn(1, 32, 8),), {}).graph
    steps = read_steps(graph, Effects())
    for place in range(len(steps.steps)):
        for candidate in candidates_at(steps, place):
            region = Region(candidate.flow, candidate.flow.alignment)
            assert all(isinstance(node.meta["val"], torch.Tensor) for node, _ in region.flow.inputs)


class Skipping(nn.Module):
    """Attention four times; between, more and more is kept for the end, as in a UNet."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for _ in range(4):
            kept += [x + 1, x + 2, x + 3, x + 4]
            x = (x @ x.mT).softmax(-1) @ x
        return torch.cat([x, *kept], -1)


def test_each_peak_is_lowered_where_live_bytes_only_grow() -> None:
    chunked = autochunk(
        Skipping().eval(), (torch.randn(1, 512, 4),), max_memory=0.3, max_slowdown=ANY
    )
    assert len(chunked.plan.regions) == 4


def test_a_region_that_moves_what_runs_under_autocast() -> None:
    """Its operator reads a graph of its own, which stands behind the place where it goes."""
    transformers = pytest.importorskip("transformers")
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    config = transformers.ModernBertConfig(
        vocab_size=99,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        global_attn_every_n_layers=2,
        local_attention=16,
        attn_implementation="eager",
        reference_compile=False,
        **special,
        cls_token_id=0,
        sep_token_id=0,
    )
    model, ids = transformers.ModernBertModel(config).eval(), torch.arange(128).view(2, 64) % 99
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    chunked = autochunk(model, (), given, max_slowdown=ANY)
    with torch.no_grad():
        found, right = chunked(**given)[0], model(**given)[0]
    assert chunked.plan.regions and largest_difference(found, right) <= 1e-5


def candidate_from(function: Callable[..., torch.Tensor], first: str, last: str) -> object:
    """The candidate of the steps between two operators, sliced along rows."""
    model = Lambda(function, nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    steps = read_steps(capture(model, (torch.randn(1, 64, 8),), {}).graph, Effects())
    names = [step.node.name for step in steps.steps]
    return candidate_in(steps, names.index(first), names.index(last), 1)


@pytest.mark.parametrize("write", [False, True])
def test_who_reads_before_a_write_in_place_is_not_put_behind_it(write: bool) -> None:
    """Sums along the sliced rows are in no region, and would run after it."""

    def written_later(x: torch.Tensor, first: nn.Module, last: nn.Module) -> torch.Tensor:
        hidden = first(x)
        sums = hidden.cumsum(1)
        return last(hidden.relu_() if write else hidden.relu()) + sums

    assert (candidate_from(written_later, "linear", "linear_1") is None) == write


@pytest.mark.parametrize("write", [False, True])
def test_two_views_that_leave_a_region_are_not_two_copies_of_what_is_written_later(
    write: bool,
) -> None:
    def written_through_one(x: torch.Tensor, first: nn.Module, _: nn.Module) -> torch.Tensor:
        hidden = first(x).tanh()
        view = hidden.view(1, 64, 2, 4)
        if write:
            hidden[:, 0] = 5
        return view.flatten(2) + hidden.cumsum(1)

    assert (candidate_from(written_through_one, "linear", "view") is None) == write


@pytest.mark.parametrize("shaped", [torch.Tensor.view_as, torch.Tensor.reshape_as])
def test_a_view_like_another_tensor_is_sliced_with_it(shaped: Callable) -> None:
    def block(x: torch.Tensor, up: nn.Module, down: nn.Module) -> torch.Tensor:
        wide = up(x).relu()
        return down(shaped(wide.flatten(0, 1), wide))

    chunked = chunked_equals(
        Lambda(block, nn.Linear(8, 64), nn.Linear(64, 8)), torch.randn(16, 8, 8)
    )
    assert not chunked.plan.walls
    assert chunked.plan.peak < chunked.plan.peak_before / 2
