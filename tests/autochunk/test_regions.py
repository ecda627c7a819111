"""Regions on small graphs: halos, strides, writes in place, random numbers, walls.

Outputs are compared with the unchunked model's in float64, peaks of memory with the plan's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from tests.autochunk.helpers import ANY_SLOWDOWN, Lambda, measured_peak, relative_error, steps_of
from wf_backends.autochunk import ChunkPlan, autochunk
from wf_backends.autochunk.graph import Steps, capture
from wf_backends.autochunk.lower import lower
from wf_backends.autochunk.search import Candidate, candidate_in, candidates_at


def checked_plan(model: nn.Module, x: Tensor) -> ChunkPlan:
    """The plan of a model whose outputs in slices are exact, with the predicted peak."""
    model, x = model.double().eval(), x.double()
    chunked = autochunk(model, (x,), max_slowdown=ANY_SLOWDOWN)
    with torch.no_grad():
        assert relative_error(chunked(x), model(x)) <= 1e-12
    assert isinstance(chunked.plan, ChunkPlan) and chunked.plan.regions
    assert chunked.plan.peak == pytest.approx(measured_peak(chunked, {"x": x}), rel=0.05)
    return chunked.plan


def all_candidates(steps: Steps) -> list[Candidate]:
    return [c for step in range(len(steps.steps)) for c in candidates_at(steps, step)]


class TestImages:
    """Slices of rows of an image."""

    def test_group_norm_between_two_convolutions_is_exact(self) -> None:
        def block(x: Tensor, first: nn.Module, norm: nn.Module, second: nn.Module) -> Tensor:
            return second(F.silu(norm(first(x))))

        parts = nn.Conv2d(4, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.Conv2d(16, 4, 3, padding=1)
        checked_plan(Lambda(block, *parts), torch.randn(1, 4, 32, 32))

    def test_stride_and_upsampling_are_exact(self) -> None:
        def block(x: Tensor, down: nn.Module, widen: nn.Module) -> Tensor:
            upsampled = F.interpolate(F.relu(widen(x)), scale_factor=2.0)
            return down(upsampled).sum(1, keepdim=True)

        parts = nn.Conv2d(8, 2, 3, stride=2, padding=1), nn.Conv2d(2, 8, 5, padding=2)
        checked_plan(Lambda(block, *parts), torch.randn(1, 2, 24, 24))

    def test_items_of_a_list_may_be_read_with_and_without_a_halo(self) -> None:
        """As in YOLO's blocks and ShuffleNet."""

        def block(x: Tensor, widen: nn.Module, conv: nn.Module, narrow: nn.Module) -> Tensor:
            left, right = widen(x).chunk(2, 1)
            return narrow(torch.cat([left, right, conv(right)], 1))

        parts = nn.Conv2d(2, 16, 1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(24, 2, 1)
        assert checked_plan(Lambda(block, *parts), torch.randn(1, 2, 48, 48)).saved > 0.6

    def test_transposed_convolutions_and_instance_norms_are_exact(self) -> None:
        """As in nnU-Net and V-Net."""

        def block(x: Tensor, up: nn.Module, norm: nn.Module, act: nn.Module, conv: Any) -> Tensor:
            return conv(act(norm(up(x))))

        up = nn.ConvTranspose2d(4, 16, 3, 2, 1, 1)
        parts = up, nn.InstanceNorm2d(16, affine=True), nn.PReLU(16), nn.Conv2d(16, 2, 1)
        plan = checked_plan(Lambda(block, *parts), torch.randn(1, 4, 32, 32))
        assert plan.walls == (("group_statistics", 1),)  # which needs the output of `up` whole
        assert plan.saved > 0.4

    def test_padded_copies_of_slices_are_counted(self) -> None:
        """A convolution alone: with two slices over its input each of them is at a border."""
        parts = nn.Conv2d(4, 4, 3, padding=1)
        model = Lambda(lambda x, conv: conv(x.exp()).exp().sum(), parts)
        steps = steps_of(model, torch.randn(1, 4, 32, 32))
        position = next(i for i, step in enumerate(steps.steps) if "conv" in step.node.name)
        candidate = candidate_in(steps, position, position, 2)
        assert candidate is not None and candidate.overwritten is not None
        lowered = lower(steps.graph, [candidate.region(16)], steps.effects)
        assert lowered.peak == pytest.approx(candidate.peak(2), rel=0.05)

    def test_value_that_is_also_read_outside_has_all_its_rows(self) -> None:
        """Of `hidden` the strided convolution reads every second row, the mean all of them."""

        def block(x: Tensor, widen: nn.Module, down: nn.Module) -> Tensor:
            hidden = torch.tanh(widen(x))
            return down(hidden * 2) + hidden.mean()

        parts = nn.Conv2d(2, 8, 1), nn.Conv2d(8, 2, 1, stride=2)
        checked_plan(Lambda(block, *parts), torch.randn(1, 2, 24, 24))


def strided_reader(x: Tensor) -> Tensor:
    hidden = x.tanh()
    return F.max_pool2d(hidden, 1, 2).sum() + hidden


def pool_of_an_odd_size(x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = x[..., :9].tanh()
    return hidden, F.max_pool2d(hidden, 2)


def reader_of_the_first_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = x.tanh()
    return hidden, hidden[:, :, :4] * 2


def gather_of_fewer_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = x.tanh()
    return hidden, hidden.gather(2, torch.zeros(1, 2, 6, 5, dtype=torch.int64))


def padding_wider_than_a_slice(x: Tensor) -> Tensor:
    pooled = F.max_pool2d(F.avg_pool2d(x.tanh(), 2), 3, 1, 1)
    return F.pad(F.pad(pooled, (5, -2, 5, 5)), (-1, 3))


def attention_that_nobody_reads(x: Tensor) -> Tensor:
    hidden = x.tanh()
    F.scaled_dot_product_attention(hidden, hidden, hidden).relu_()
    return x + 1


def part_read_by_position(x: Tensor) -> Tensor:
    return x.tanh()[..., 2:7].as_strided((1, 4, 5, 5), (400, 100, 10, 1), 1) + 1


@pytest.mark.parametrize(
    "function",
    [
        strided_reader,
        pool_of_an_odd_size,
        reader_of_the_first_rows,
        gather_of_fewer_rows,
        padding_wider_than_a_slice,
        attention_that_nobody_reads,
        part_read_by_position,
    ],
    ids=lambda function: function.__name__,
)
def test_every_candidate_computes_the_models_outputs(function: Callable[..., object]) -> None:
    """Each candidate alone, in slices of its smallest length."""
    x = torch.randn(1, 4, 10, 10).double()
    expected = pytree.tree_leaves(function(x))
    steps = steps_of(Lambda(function), x)
    candidates = all_candidates(steps)
    assert candidates
    for candidate in candidates:
        region = candidate.region(candidate.flow.alignment)
        outputs = lower(steps.graph, [region], steps.effects).module(x)
        torch.testing.assert_close(list(outputs), expected, rtol=1e-12, atol=1e-12)


class TestWritesInPlace:
    def test_write_inside_a_region_is_exact(self) -> None:
        def attention(x: Tensor) -> Tensor:
            weights = x @ x.transpose(-1, -2)
            weights.mul_(0.1).clamp_(max=1)
            return weights.softmax(-1) @ x

        checked_plan(Lambda(attention), torch.randn(2, 64, 8))

    def test_write_between_two_readers_is_exact(self) -> None:
        def two_attentions(x: Tensor) -> Tensor:
            y = x * 2
            first = (y @ y.transpose(-1, -2)).softmax(-1) @ y
            y.add_(1)
            return (y @ y.transpose(-1, -2)).softmax(-1) @ y + first

        checked_plan(Lambda(two_attentions), torch.randn(2, 64, 8))

    @pytest.mark.parametrize("in_place", [False, True], ids=["out of place", "in place"])
    def test_no_region_moves_a_write_before_an_earlier_reader(self, in_place: bool) -> None:
        """The cumulative sum along the sliced rows is in no region, and would run after it."""

        def block(x: Tensor, first: nn.Module, last: nn.Module) -> Tensor:
            hidden = first(x)
            sums = hidden.cumsum(1)
            return last(hidden.relu_() if in_place else hidden.relu()) + sums

        assert (candidate_between(block, "linear", "linear_1") is None) == in_place

    @pytest.mark.parametrize("in_place", [False, True], ids=["out of place", "in place"])
    def test_no_region_encloses_a_write_that_is_not_its_own(self, in_place: bool) -> None:
        """It would run before or after the region."""

        def block(x: Tensor, first: nn.Module, last: nn.Module) -> Tensor:
            hidden, doubled = first(x), x * 2
            doubled = doubled.add_(1) if in_place else doubled.add(1)
            return last(hidden.relu()) + doubled

        assert (candidate_between(block, "linear", "linear_1") is None) == in_place

    @pytest.mark.parametrize("in_place", [False, True], ids=["out of place", "in place"])
    def test_no_region_copies_two_views_of_a_value_that_is_written_later(
        self, in_place: bool
    ) -> None:
        def block(x: Tensor, first: nn.Module, _: nn.Module) -> Tensor:
            hidden = first(x).tanh()
            view = hidden.view(1, 64, 2, 4)
            if in_place:
                hidden[:, 0] = 5
            return view.flatten(2) + hidden.cumsum(1)

        assert (candidate_between(block, "linear", "view") is None) == in_place


def candidate_between(function: Callable[..., Tensor], first: str, last: str) -> Candidate | None:
    """The candidate of the steps between two operators, sliced along rows; None if illegal."""
    steps = steps_of(Lambda(function, nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(1, 64, 8))
    names = [step.node.name for step in steps.steps]
    return candidate_in(steps, names.index(first), names.index(last), 1)


def test_random_numbers_are_the_models() -> None:
    def noisy(x: Tensor) -> Tensor:
        out = (x @ x.transpose(-1, -2)).softmax(-1) @ x
        noise = torch.rand_like(out)
        return (out + noise) * F.dropout(out, 0.5, training=True)

    model, x = Lambda(noisy).eval(), torch.randn(2, 64, 8)
    chunked = autochunk(model, (x,), max_slowdown=ANY_SLOWDOWN)
    assert chunked.plan.regions
    with torch.no_grad():
        torch.manual_seed(1)
        expected = model(x)
        torch.manual_seed(1)
        assert torch.equal(chunked(x), expected)


@pytest.mark.parametrize("random", [False, True], ids=["ones", "random numbers"])
def test_no_region_encloses_an_operator_that_draws_random_numbers(random: bool) -> None:
    """It would run before or after the region, and might change places with another one."""

    def block(x: Tensor, first: nn.Module, last: nn.Module) -> Tensor:
        hidden = first(x)
        noise = torch.rand_like(x) if random else torch.ones_like(x)
        return last(hidden.relu()) + noise

    assert (candidate_between(block, "linear", "linear_1") is None) == random


def test_operator_without_a_rule_is_a_wall_and_is_named() -> None:
    def attention_of_spectra(x: Tensor) -> Tensor:
        y = torch.fft.fftn(x).abs()
        return (y @ y.transpose(-1, -2)).softmax(-1) @ y

    plan = checked_plan(Lambda(attention_of_spectra), torch.randn(1, 64, 8))
    assert "no rule for it: aten.fft_fftn.default (1 times)" in plan.explain()


def test_convolutions_by_fourier_transforms_are_sliced_along_channels() -> None:
    """As in Hyena and S4."""

    def block(x: Tensor, up: nn.Module, down: nn.Module) -> Tensor:
        u = up(x).transpose(1, 2)
        spectra = torch.fft.rfft(u, n=2 * u.shape[-1])
        y = torch.fft.irfft(spectra * spectra, n=2 * u.shape[-1])[..., : u.shape[-1]]
        return down((y * u).transpose(1, 2))

    model = Lambda(block, nn.Linear(4, 32), nn.Linear(32, 4))
    assert checked_plan(model, torch.randn(1, 256, 4)).saved > 0.6


def test_equal_layers_have_equal_regions() -> None:
    def layers(x: Tensor) -> Tensor:
        for _ in range(4):
            x = x + (x @ x.transpose(-1, -2)).softmax(-1) @ x
        return x

    plan = checked_plan(Lambda(layers), torch.randn(1, 128, 8))
    assert len(plan.regions) == 4
    assert len({(part.length, part.operators) for part in plan.regions}) == 1


def test_no_region_has_one_slice_only() -> None:
    """XLNet's relative positions: rows are shifted by a reshape of 64 x 128 to 128 x 64 and one of
    127 x 64 to 64 x 127, so that slices would begin at multiples of 128 rows."""

    def shifted(x: Tensor) -> Tensor:
        scores = x @ torch.cat([x, x], 1).transpose(-1, -2)
        moved = scores.view(1, 128, 64)[:, 1:].reshape(1, 64, 127)
        return moved.index_select(2, torch.arange(64)).softmax(-1) @ x

    model, x = Lambda(shifted), torch.randn(1, 64, 8)
    assert all(part.chunks > 1 for part in checked_plan(model, x).regions)
    candidates = all_candidates(steps_of(model, x.double()))
    assert candidates and all(candidate.max_slices > 1 for candidate in candidates)


def test_no_region_reads_a_list_of_tensors() -> None:
    """`chunk` returns one."""

    def gated(x: Tensor) -> Tensor:
        value, gate = x.repeat(1, 1, 6).chunk(2, dim=-1)
        return value * gate.sigmoid()

    candidates = all_candidates(steps_of(Lambda(gated), torch.randn(1, 32, 8)))
    assert candidates
    for candidate in candidates:
        inputs = candidate.flow.inputs
        assert all(isinstance(node.meta["val"], Tensor) for node, _ in inputs), candidate


def test_every_peak_is_lowered_while_live_bytes_grow() -> None:
    """Attention four times; between, values are kept to the end, as in a UNet."""

    def skip_connections(x: Tensor) -> Tensor:
        kept = []
        for _ in range(4):
            kept += [x + 1, x + 2, x + 3, x + 4]
            x = (x @ x.mT).softmax(-1) @ x
        return torch.cat([x, *kept], -1)

    model, x = Lambda(skip_connections).eval(), torch.randn(1, 512, 4)
    chunked = autochunk(model, (x,), max_memory=0.3, max_slowdown=ANY_SLOWDOWN)
    assert len(chunked.plan.regions) == 4


def block_under_autocast(enabled: bool) -> nn.Module:
    """Its scale is computed between the operators of a region, and one block is in another."""

    def block(x: Tensor, up: nn.Module, down: nn.Module) -> Tensor:
        wide = up(x).relu()
        with torch.autocast("cpu", enabled=enabled):
            with torch.autocast("cuda", enabled=False):
                scale = x[:1, :1, :1] * 2
            total = scale @ scale
        return down(wide * total.float())

    return Lambda(block, nn.Linear(8, 64), nn.Linear(64, 8)).eval()


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("outside", [False, True])
def test_operators_under_autocast(enabled: bool, outside: bool) -> None:
    """Those of a block that leaves autocast as it is are sliced; a region with another block can be
    moved, with the subgraph that the block reads."""
    model, x = block_under_autocast(enabled), torch.randn(16, 8, 8)
    with torch.no_grad(), torch.autocast("cpu", enabled=outside):
        chunked = autochunk(model, (x,), max_slowdown=ANY_SLOWDOWN)
        assert chunked.plan.regions
        blocks = [n for n in capture(model, (x,), {}).graph.nodes if "autocast" in str(n.target)]
        assert len(blocks) == (enabled != outside)
        assert torch.equal(chunked(x), model(x))
    with torch.no_grad(), torch.autocast("cpu", enabled=not outside):
        assert torch.equal(chunked(x), model(x))


@pytest.mark.parametrize("reshape", [Tensor.view_as, Tensor.reshape_as])
def test_view_as_another_tensor_is_sliced(reshape: Callable[[Tensor, Tensor], Tensor]) -> None:
    def block(x: Tensor, up: nn.Module, down: nn.Module) -> Tensor:
        wide = up(x).relu()
        return down(reshape(wide.flatten(0, 1), wide))

    plan = checked_plan(Lambda(block, nn.Linear(8, 64), nn.Linear(64, 8)), torch.randn(16, 8, 8))
    assert not plan.walls
    assert plan.peak < plan.peak_before / 2
