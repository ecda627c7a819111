"""The predicted time that slices add, from the rates of a device.

Each test checks one term: weights read again, matrices copied again, halos, loop iterations, flops.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.autochunk.helpers import Lambda, attention_and_spectrum, flow_of, steps_of
from wf_backends.autochunk.cost import OperatorCost, Rates, is_interleaved, measure_rates
from wf_backends.autochunk.select import Search
from wf_backends.autochunk.slicing import SlicedOperator

RATES = Rates(2e-6, 1e11, 2.5e10, 1e10)


def added_seconds(op: SlicedOperator, flops: int, num_slices: int, rates: Rates = RATES) -> float:
    cost = OperatorCost.estimate(op, flops, rates)
    return cost.seconds(num_slices) - cost.seconds(1)


def test_slices_that_read_all_of_a_large_weight_cost_more_than_slices_of_it() -> None:
    linear, x = nn.Linear(1024, 4096).eval(), torch.zeros(512, 1024)
    flops = 2 * 512 * 1024 * 4096
    by_rows, by_columns = (flow_of(linear, (x,), dim).end for dim in (0, 1))
    assert added_seconds(by_rows, flops, 8) > 4 * added_seconds(by_columns, flops, 8) > 0


def test_fused_attention_counts_the_flops_of_its_two_products() -> None:
    def attention(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)

    (step,) = steps_of(Lambda(attention), torch.zeros(2, 4, 128, 16)).steps
    assert step.flops == 2 * (2 * 2 * 4 * 128 * 128 * 16)


class Einsum(nn.Module):
    def __init__(self, equation: str) -> None:
        super().__init__()
        self.equation = equation

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.einsum(self.equation, x, y)


class PermutedProduct(nn.Module):
    def __init__(self, *order: int) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.permute(self.order) @ y.permute(self.order)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Einsum("bikc,bjkc->bijc"), True),
        (Einsum("...ikc, ...jkc -> ...ijc"), True),
        (Einsum("bcik,bcjk->bcij"), False),
        (Einsum("bikc,bjkc->bijk"), False),  # c is summed
        (Einsum("bikc,bjkd->bijcd"), False),
        (PermutedProduct(0, 3, 1, 2), True),
        (PermutedProduct(0, 1, 2, 3), False),
        (PermutedProduct(0, 2, 1, 3), False),
    ],
    ids=lambda value: getattr(value, "equation", str(getattr(value, "order", value))),
)
def test_matrices_whose_innermost_dimension_is_the_batch_are_interleaved(
    model: nn.Module, expected: bool
) -> None:
    x = torch.zeros(2, 3, 3, 3)
    product = steps_of(model, x, x).steps[-1].node
    inputs = product.all_input_nodes
    assert inputs and all(is_interleaved(product, node) == expected for node in inputs)


def test_slices_along_rows_copy_interleaved_matrices_each_time() -> None:
    """A product over the pairs of 64 residues, of 128 channels: the batch is innermost."""
    x = torch.zeros(1, 64, 64, 128)
    product, flops = Einsum("bikc,bjkc->bijc").eval(), 2 * 64**3 * 128
    rates = Rates(5e-6, 5e10, 1e10, 1e10, interleaved_bytes_per_s=4e8)
    rows, channels = (flow_of(product, (x, x), dim).end for dim in (1, 3))
    by_rows, by_channels = (OperatorCost.estimate(op, flops, rates) for op in (rows, channels))
    assert by_rows.seconds(64) > 64 * x.nbytes / 4e8
    assert by_channels.seconds(64) < 2 * by_channels.seconds(1)


@pytest.mark.parametrize(
    ("channels", "kernel", "expected"),
    [(128, 3, 7 * 4e-4), (32, 3, 7e-4), (128, 1, 0.0)],
    ids=["128 channels", "32 channels", "no halo"],
)
def test_each_further_slice_of_a_convolution_adds_the_time_of_its_halo(
    channels: int, kernel: int, expected: float
) -> None:
    """4e-4 s for 128 channels; it grows with the root of the weight's bytes, as the channels."""
    conv = nn.Conv2d(channels, channels, kernel, padding=kernel // 2).eval()
    op = flow_of(conv, (torch.zeros(1, channels, 32, 32),), 2).end
    free, with_halo = (Rates(2e-6, 1e11, 2.5e10, halo_seconds=halo) for halo in (0.0, 4e-4))
    added = added_seconds(op, 1, 8, with_halo) - added_seconds(op, 1, 8, free)
    assert added == pytest.approx(expected, abs=1e-12)


def test_each_slice_adds_the_time_of_a_loop_iteration() -> None:
    steps = steps_of(Lambda(attention_and_spectrum), torch.zeros(512, 8))

    def slices_and_added_seconds(slice_seconds: float) -> tuple[int, float]:
        rates = Rates(2e-6, 1e11, 2.5e10, 1e10, slice_seconds=slice_seconds)
        (choice,) = Search(steps, rates).within_memory(1).choices
        return choice.num_slices, choice.added_seconds

    num_slices, free = slices_and_added_seconds(0.0)
    same_num_slices, added = slices_and_added_seconds(5e-5)
    assert num_slices == same_num_slices
    assert added - free == pytest.approx(num_slices * 5e-5, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_measured_rates_of_this_machine_are_plausible(dtype: torch.dtype) -> None:
    """Bounds are wide: 16-bit products of few rows run at 5 MB/s on a CPU without an instruction
    for them."""
    rates = measure_rates(torch.device("cpu"), dtype)
    assert 0 < rates.launch_seconds < 1
    assert 1e5 < rates.flops_per_s < 1e15
    assert 1e5 < rates.bytes_per_s < 1e15
    assert 1e5 < rates.packed_bytes_per_s < 1e15
    assert 1e5 < rates.interleaved_bytes_per_s < 1e15
    assert 0 < rates.slice_seconds < 1
    assert 0 <= rates.halo_seconds < 1
