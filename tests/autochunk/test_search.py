"""What a slice costs, how it is cut, and that a selection is no finer than its peak needs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from wf_backends.autochunk.cost import Cost, Rates, measure_rates
from wf_backends.autochunk.region import slice_length
from wf_backends.autochunk.select import Search, Selection
from wf_backends.graph.capture import capture
from wf_backends.graph.memory import Effects, read_steps
from wf_backends.slicing import Flow, SlicedOperator, is_interleaved, sources, trace

RATES = Rates(2e-6, 1e11, 2.5e10, 1e10)

FINGERPRINT = """
import torch
from wf_backends.graph.capture import capture
model = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.GroupNorm(2, 4)).eval()
found = capture(model, (torch.zeros(1, 2, 8, 8),), {}).fingerprint
"""


def flow_of(function: nn.Module, args: tuple[torch.Tensor, ...], dim: int) -> Flow:
    captured = capture(function, args, {})
    flow = trace([n for n in captured.graph.nodes if n.op == "call_function"], dim)
    assert flow is not None
    return flow


class ScoresAndSpectrum(nn.Module):
    """Scores of 1 MiB in slices, and a wall that holds 256 KiB."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = (x @ x.transpose(-1, -2)).softmax(-1) @ x
        return torch.fft.fft(mixed.repeat(1, 8)).abs().sum(1)


def test_no_region_is_cut_finer_than_the_peak_needs() -> None:
    captured = capture(ScoresAndSpectrum().eval(), (torch.zeros(512, 8),), {})
    found = Search(read_steps(captured.graph, Effects()), RATES).within_memory(1)
    (choice,) = found.choices
    (candidate,) = choice.candidates
    assert choice.num_slices == candidate.slices_within(found.peak)
    assert choice.num_slices < candidate.max_slices


def test_long_slices_have_an_even_number_of_rows() -> None:
    flow = flow_of(nn.Linear(4, 4).eval(), (torch.zeros(577, 4),), 0)
    lengths = {chunks: slice_length(flow, chunks) for chunks in (1, 2, 14, 36, 64, 577)}
    assert lengths == {1: 577, 2: 304, 14: 48, 36: 32, 64: 10, 577: 1}


def test_much_longer_slices_on_a_gpu_fit_cudnns_attention() -> None:
    flow = flow_of(nn.Linear(4, 4).eval(), (torch.zeros(5000, 4),), 0)
    with FakeTensorMode():
        flow.end.node.meta["val"] = torch.empty(5000, 4, device="cuda")
    lengths = {chunks: slice_length(flow, chunks) for chunks in (1, 3, 20)}
    assert lengths == {1: 5000, 3: 14 * 128, 20: 256}


def test_slices_that_read_a_large_weight_whole_cost_more_than_slices_of_it() -> None:
    linear, x = nn.Linear(1024, 4096).eval(), torch.zeros(512, 1024)
    flops = 2 * 512 * 1024 * 4096
    by_rows, by_columns = (flow_of(linear, (x,), dim).end for dim in (0, 1))

    def added(op: SlicedOperator, chunks: int) -> float:
        cost = Cost.estimate(op, flops, RATES)
        return cost.seconds(chunks) - cost.seconds(1)

    assert added(by_rows, 8) > 4 * added(by_columns, 8) > 0


def test_fused_attention_computes_as_many_flops_as_its_two_products() -> None:
    class Fused(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    graph = capture(Fused().eval(), (torch.zeros(2, 4, 128, 16),), {}).graph
    assert [step.flops for step in read_steps(graph, Effects()).steps] == [4 * 2 * 4 * 128**2 * 16]


class Layers(nn.Module):
    """So many layers of attention, all alike."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.count):
            x = x + (x @ x.transpose(-1, -2)).softmax(-1) @ x
        return x


def test_layers_that_are_alike_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def counted(*args: Any) -> Any:
        asked.append(args)
        return sources(*args)

    monkeypatch.setattr("wf_backends.graph.memory.sources", counted)
    counts = {}
    for layers in (4, 12):
        asked.clear()
        graph = capture(Layers(layers).eval(), (torch.zeros(1, 256, 8),), {}).graph
        found = Search(read_steps(graph, Effects()), RATES).within_slowdown(100.0)
        regions = sum(len(choice.candidates) for choice in found.choices)
        assert regions == 2 * layers - 1  # attention, and sums over all but the input
        counts[layers] = len(asked)
    assert 0 < counts[12] <= counts[4]


def test_a_fingerprint_is_the_same_in_another_process() -> None:
    here: dict[str, str] = {}
    exec(FINGERPRINT, here)
    script = FINGERPRINT + "print(found)"
    there = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert there.stdout.split() == [here["found"]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rates_of_this_machine(dtype: torch.dtype) -> None:
    """CPUs differ by much: 16-bit products of few rows take seconds where no instruction does them
    (5 MB/s on one without)."""
    rates = measure_rates(torch.device("cpu"), dtype)
    assert 0 < rates.launch_seconds < 1
    assert all(1e5 < rate < 1e15 for rate in (rates.flops_per_s, rates.bytes_per_s))
    assert 1e5 < rates.packed_bytes_per_s < 1e15
    assert 1e5 < rates.interleaved_bytes_per_s < 1e15
    assert 0 < rates.slice_seconds < 1
    assert 0 <= rates.halo_seconds < 1


class Product(nn.Module):
    """An einsum of two tensors; without "->" in `equation`, a product of them permuted so."""

    def __init__(self, equation: str) -> None:
        super().__init__()
        self.equation = equation

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if "->" in self.equation:
            return torch.einsum(self.equation, x, y)
        order = [int(dim) for dim in self.equation]
        return x.permute(order) @ y.permute(order)


@pytest.mark.parametrize(
    ("equation", "expected"),
    [
        ("bikc,bjkc->bijc", True),
        ("...ikc, ...jkc -> ...ijc", True),
        ("bcik,bcjk->bcij", False),
        ("bikc,bjkc->bijk", False),  # c is summed
        ("bikc,bjkd->bijcd", False),
        ("0312", True),
        ("0123", False),
        ("0213", False),
    ],
)
def test_matrices_whose_elements_lie_between_each_other(equation: str, expected: bool) -> None:
    x = torch.zeros(2, 3, 3, 3)
    captured = capture(Product(equation).eval(), (x, x), {})
    *_, product = (n for n in captured.graph.nodes if n.op == "call_function")
    read = list(product.all_input_nodes)
    assert [is_interleaved(product, node) for node in read] == [expected] * len(read)


def test_slices_that_copy_the_other_matrices_each_time_pay_for_it() -> None:
    """A product over the pairs of 64 residues, of 128 channels."""
    x = torch.zeros(1, 64, 64, 128)
    rows, channels = (flow_of(Product("bikc,bjkc->bijc").eval(), (x, x), dim).end for dim in (1, 3))
    flops = 2 * 64**3 * 128
    dear, cheap = (
        Cost.estimate(op, flops, Rates(5e-6, 5e10, 1e10, 1e10, 4e8)) for op in (rows, channels)
    )
    assert dear.seconds(64) > 64 * x.nbytes / 4e8
    assert cheap.seconds(64) < 2 * cheap.seconds(1)


@pytest.mark.parametrize(
    ("channels", "kernel", "expected"), [(128, 3, 7 * 4e-4), (32, 3, 7e-4), (128, 1, 0.0)]
)
def test_slices_of_a_convolution_with_a_halo_take_longer(
    channels: int, kernel: int, expected: float
) -> None:
    conv = nn.Conv2d(channels, channels, kernel, padding=kernel // 2).eval()
    x = torch.zeros(1, channels, 32, 32)
    op = flow_of(conv, (x,), 2).end
    without, with_halo = (
        Cost.estimate(op, 1, Rates(2e-6, 1e11, 2.5e10, halo_seconds=each)) for each in (0.0, 4e-4)
    )
    added = [cost.seconds(8) - cost.seconds(1) for cost in (without, with_halo)]
    assert added[1] - added[0] == pytest.approx(expected, abs=1e-12)


def test_each_slice_costs_a_turn_of_the_loop() -> None:
    captured = capture(ScoresAndSpectrum().eval(), (torch.zeros(512, 8),), {})

    def added(turn: float) -> tuple[int, float]:
        rates = Rates(2e-6, 1e11, 2.5e10, 1e10, slice_seconds=turn)
        (choice,) = Search(read_steps(captured.graph, Effects()), rates).within_memory(1).choices
        return choice.num_slices, choice.added_seconds

    (chunks, free), (same, dear) = added(0.0), added(5e-5)
    assert chunks == same
    assert dear - free == pytest.approx(chunks * 5e-5, abs=1e-12)


def test_a_larger_budget_that_takes_longer_does_not_hide_a_smaller_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of an Evoformer block, whose smallest plan takes longer than allowed, too."""
    captured = capture(ScoresAndSpectrum().eval(), (torch.zeros(512, 8),), {})
    search = Search(read_steps(captured.graph, Effects()), RATES)
    whole = max(search.steps.peaks)

    def within(budget: int) -> Selection:
        share = max(budget / whole, 0.17)
        slow = share < 0.175 or 0.185 < share < 0.232
        return Selection((), int(share * whole), 0.2 if slow else 0.05)

    monkeypatch.setattr(search, "within_memory", within)
    found = search.within_slowdown(0.1)
    assert found.slowdown == 0.05
    assert found.peak < 0.185 * whole
