"""The search for regions: how slices are cut, and which selection of regions it returns."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.autochunk.helpers import Lambda, attention_and_spectrum, flow_of, steps_of
from wf_backends.autochunk.cost import Rates
from wf_backends.autochunk.graph.capture import capture
from wf_backends.autochunk.region import slice_length
from wf_backends.autochunk.select import Search, Selection

RATES = Rates(2e-6, 1e11, 2.5e10, 1e10)


def search_of(function: Any, x: torch.Tensor) -> Search:
    return Search(steps_of(Lambda(function), x), RATES)


def test_no_region_has_more_slices_than_the_peak_needs() -> None:
    """The wall decides the peak: slices of the scores need not be as small as possible."""
    selection = search_of(attention_and_spectrum, torch.zeros(512, 8)).within_memory(1)
    (choice,) = selection.choices
    candidate = choice.candidate
    assert choice.num_slices == candidate.slices_within(selection.peak)
    assert choice.num_slices < candidate.max_slices


def test_each_of_two_equal_layers_has_the_fewest_slices_for_itself() -> None:
    """64 KiB more are live while the first one runs; `fft` between them is a wall."""

    def two_layers(x: torch.Tensor) -> torch.Tensor:
        kept = x.repeat(1, 8)
        x = (x @ x.T).softmax(-1) @ x
        x = torch.fft.fft(x).real.repeat(1, 8) + kept
        x = x[:, :8] * 1  # no view, so that the wider tensor is not live any more
        return (x @ x.T).softmax(-1) @ x

    selection = search_of(two_layers, torch.zeros(256, 8)).within_memory(192 * 1024)
    layers = [choice.candidate for choice in selection.choices]
    assert [choice.num_slices for choice in selection.choices] == [6, 4]
    assert [candidate.slices_within(selection.peak) for candidate in layers] == [6, 4]


def test_regions_are_replaced_by_a_wider_one_if_they_leave_a_peak_above_the_budget() -> None:
    """A region of the MLP and one of the concatenation would leave a peak of 98,624 bytes; one
    region of all operators fits 66 KiB."""

    def mlp_with_skip_connections(x: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        y = x + x.repeat(1, 4).sigmoid().reshape(*x.shape, 4).sum(-1)
        return torch.cat([y, x, doubled, y * 2], -1)

    search, budget = search_of(mlp_with_skip_connections, torch.zeros(256, 16)), 66 * 1024
    selection = search.within_memory(budget)
    (choice,) = selection.choices
    candidate = choice.candidate
    assert (candidate.lo, candidate.hi) == (0, len(search.steps.steps) - 1)
    assert selection.peak <= budget < max(search.steps.peaks)


@pytest.mark.parametrize(
    ("num_slices", "length"), [(1, 577), (2, 304), (14, 48), (36, 32), (64, 10), (577, 1)]
)
def test_long_slices_have_a_multiple_of_16_rows(num_slices: int, length: int) -> None:
    flow = flow_of(nn.Linear(4, 4).eval(), (torch.zeros(577, 4),), 0)
    assert slice_length(flow, num_slices) == length


@pytest.mark.parametrize(("num_slices", "length"), [(1, 5000), (3, 14 * 128), (20, 256)])
def test_very_long_slices_on_cuda_have_a_multiple_of_128_rows(num_slices: int, length: int) -> None:
    """As cuDNN's attention needs them."""
    flow = flow_of(nn.Linear(4, 4).eval(), (torch.zeros(5000, 4),), 0)
    with FakeTensorMode():
        flow.end.node.meta["val"] = torch.empty(5000, 4, device="cuda")
    assert slice_length(flow, num_slices) == length


def test_budget_that_is_slower_than_a_smaller_one_does_not_end_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Made-up selections, as of an Evoformer block: the largest ones are fast enough, then some are
    too slow, then some fast enough again, and the smallest are too slow."""
    search = search_of(attention_and_spectrum, torch.zeros(512, 8))
    model_peak = max(search.steps.peaks)

    def within_memory(budget: int) -> Selection:
        share = max(budget / model_peak, 0.17)
        too_slow = share < 0.175 or 0.185 < share < 0.232
        return Selection((), int(share * model_peak), 0.2 if too_slow else 0.05)

    monkeypatch.setattr(search, "within_memory", within_memory)
    selection = search.within_slowdown(0.1)
    assert selection.slowdown == 0.05
    assert selection.peak < 0.185 * model_peak


FINGERPRINT = """
import torch
from wf_backends.autochunk.graph.capture import capture
model = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.GroupNorm(2, 4)).eval()
fingerprint = capture(model, (torch.zeros(1, 2, 8, 8),), {}).fingerprint
"""


def test_fingerprint_is_the_same_on_another_device() -> None:
    model = Lambda(lambda x: x + torch.arange(4, device=x.device)).eval()
    inputs = [torch.zeros(2, 4, device=device) for device in ("cpu", "meta")]
    assert len({capture(model, (x,), {}).fingerprint for x in inputs}) == 1


def test_fingerprint_is_the_same_in_another_process() -> None:
    variables: dict[str, str] = {}
    exec(FINGERPRINT, variables)
    command = [sys.executable, "-c", FINGERPRINT + "print(fingerprint)"]
    output = subprocess.run(command, capture_output=True, text=True).stdout
    assert output.split() == [variables["fingerprint"]]
