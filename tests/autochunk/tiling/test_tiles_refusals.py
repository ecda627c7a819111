"""What cannot be tiled is refused by name: tiles, outputs, parameters that others own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from tests.autochunk.tiling.helpers import BOTH_LAYERS, ROWS, WIDTH, TwoLayers, tiled_modules
from wf_backends.autochunk.tiling import Tiles, tile_modules


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        (Tiles("layer", 1, 2), "module 'layer' is none of this TwoLayers"),
        (Tiles("layers.0", 1, 0), "tiles must be a positive integer, got 0"),
        (Tiles("layers.0", -1, 2), "dim must be counted from the first, 0 or more, got -1"),
    ],
    ids=["module", "tiles", "dim"],
)
def test_wrong_tiles_are_refused_and_no_module_is_tiled(tiles: Tiles, message: str) -> None:
    model = TwoLayers()
    with pytest.raises(ValueError, match=message):
        tile_modules(model, [Tiles("layers.1", 1, 2), tiles])
    assert tiled_modules(model) == []


class Pooling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1, keepdim=True)


def test_module_whose_output_has_not_the_rows_of_its_input_is_refused() -> None:
    model = nn.Sequential(Pooling())
    with (
        tile_modules(model, [Tiles("0", 1, 2)]),
        pytest.raises(NotImplementedError, match=r"6 rows gave \(1, 1, 3\)"),
    ):
        model(torch.randn(1, ROWS, 3))


def test_dimension_that_no_input_has_is_refused() -> None:
    model = nn.Sequential(Pooling())
    with (
        tile_modules(model, [Tiles("0", 5, 2)]),
        pytest.raises(ValueError, match="no argument of a tiled module has a dim 5"),
    ):
        model(torch.randn(1, ROWS, 3))


def test_module_whose_parts_zero_3_gathers_separately_is_refused() -> None:
    model = TwoLayers()
    model.layers[0].gate.ds_id = 3  # as DeepSpeed's ZeRO 3 marks a module that it hooks
    with (
        tile_modules(model, BOTH_LAYERS),
        pytest.raises(NotImplementedError, match="ZeRO 3 would gather 'gate' of a tiled GatedMlp"),
    ):
        model(torch.randn(1, ROWS, WIDTH))


def test_parameter_that_was_added_to_a_tiled_module_is_refused() -> None:
    """By adapters, parametrizations, or FSDP1 with use_orig_params=False."""
    model = TwoLayers()
    with tile_modules(model, BOTH_LAYERS):
        weight_norm(model.layers[0].gate)
        with pytest.raises(NotImplementedError, match="'module.gate.weight' was added to a tiled"):
            model(torch.randn(1, ROWS, WIDTH))


@pytest.mark.parametrize("power", [1, 2])
def test_double_backward_through_a_tiled_module_is_refused(power: int) -> None:
    """Even of a plain sum, whose gradient needs none: second derivatives would be missing."""
    model = nn.Sequential(nn.SiLU())
    x = torch.randn(1, ROWS, WIDTH, requires_grad=True)
    with tile_modules(model, [Tiles("0", 1, 2)]):
        loss = model(x).pow(power).sum()
        with pytest.raises(NotImplementedError, match="double backward .* a tiled module"):
            torch.autograd.grad(loss, x, create_graph=True)
