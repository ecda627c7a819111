"""A split model whose weights are changed, shared, copied or pickled: exact, or refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.hetegen.models import MLP, MLP_SPLIT, fast_device, split_and_resident
from wf_backends.hetegen import dispatch_model


def write_data(weight: Tensor) -> None:
    weight.data += 1


def write_detached(weight: Tensor) -> None:
    weight.detach()[0].add_(1)


@pytest.mark.parametrize(
    "write",
    [lambda weight: weight.add_(1), write_data, write_detached],
    ids=["in place", "data", "detached"],
)
def test_a_split_weight_that_was_written_to_is_refused_until_the_model_is_split_again(
    write: Callable[[Tensor], object],
) -> None:
    model, reference, x = MLP(), MLP(), torch.randn(2, 64)
    with torch.no_grad():
        handle = dispatch_model(model, MLP_SPLIT, fast_device())
        model(x)
        write(model.layers[1].weight)
        write(reference.layers[1].weight)
        with pytest.raises(ValueError, match=r"layers\.1\.weight was changed.*handle\.remove\(\)"):
            model(x)
        handle.remove()
        assert torch.equal(model(x), reference(x))
        with dispatch_model(model, MLP_SPLIT, fast_device()):
            torch.testing.assert_close(model(x), reference(x), rtol=0, atol=1e-5)


def test_a_split_model_refuses_another_dtype_and_accepts_its_own() -> None:
    """The lanes would go on with the old weights, and keep their memory."""
    model, x = MLP(), torch.randn(2, 64)
    with torch.no_grad():
        expected = model(x)
        handle = dispatch_model(model, MLP_SPLIT, fast_device())
        model.to("cpu").float()
        torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-5)
        for convert in (lambda: model.bfloat16(), lambda: model.to(torch.float16)):
            with pytest.raises(ValueError, match=r"neither moved nor converted.*handle\.remove"):
                convert()
        handle.remove()
        assert torch.equal(model(x), expected)


class ScaledMLP(nn.Module):
    """Has a parameter that is not split (`scale`) before parameters that are."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((64,), 0.3))
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x * self.scale.float())


@pytest.mark.parametrize(
    "convert",
    [
        lambda model: model.half(),
        lambda model: model.to("meta"),
        lambda model: model.to_empty(device="cpu"),
    ],
    ids=["half", "meta", "to_empty"],
)
def test_a_refused_conversion_has_changed_no_parameter(
    convert: Callable[[nn.Module], object],
) -> None:
    """Not even those that torch would convert before it comes to a split one."""
    model, x = ScaledMLP(), torch.randn(2, 64)
    with torch.no_grad():
        expected = model(x)
        handle = dispatch_model(model, MLP_SPLIT, fast_device())
        with pytest.raises(ValueError, match=r"nor converted, and layers.*would.*handle\.remove"):
            convert(model.mlp)
        with pytest.raises(ValueError, match=r"nor converted, and scale would.*handle\.remove"):
            convert(model)
        torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-5)
        handle.remove()
        assert torch.equal(model(x), expected)
        assert model.half().scale.dtype == torch.float16


def test_a_weight_of_two_models_is_refused_for_the_second_until_the_first_is_removed() -> None:
    """Either `remove` would end the split of the other model."""
    model, sharing_model, x = MLP(), MLP(), torch.randn(2, 64)
    sharing_model.layers[1].weight = model.layers[2].weight
    with torch.no_grad():
        expected = sharing_model(x)
        handle = dispatch_model(model, MLP_SPLIT, fast_device())
        with pytest.raises(ValueError, match=r"shares layers\.1\.weight .*the other's handle\.rem"):
            dispatch_model(sharing_model, MLP_SPLIT, fast_device())
        torch.testing.assert_close(sharing_model(x), expected, rtol=0, atol=1e-5)
        handle.remove()
        with dispatch_model(sharing_model, MLP_SPLIT, fast_device()):
            torch.testing.assert_close(sharing_model(x), expected, rtol=0, atol=1e-5)


def test_split_parameters_that_are_saved_by_themselves_are_loaded_as_plain_parameters() -> None:
    model = MLP()
    with dispatch_model(model, MLP_SPLIT, fast_device()):
        torch.save(list(model.parameters()), file := io.BytesIO())
    file.seek(0)
    for loaded, parameter in zip(torch.load(file), MLP().parameters(), strict=True):
        assert type(loaded) is nn.Parameter and torch.equal(loaded, parameter)


@split_and_resident
def test_a_dispatched_model_is_neither_copied_nor_pickled_but_its_state_dict_is(
    memory: dict,
) -> None:
    """A copy would hold memory of the accelerator that no `remove` frees."""
    model, x = MLP(), torch.randn(2, 64)
    with dispatch_model(model, memory, fast_device()):
        for act in (copy.deepcopy, lambda model: torch.save(model, io.BytesIO())):
            with pytest.raises(ValueError, match=r"neither copied nor pickled.*handle\.remove\(\)"):
                act(model)
        torch.save(model.state_dict(), file := io.BytesIO())
    file.seek(0)
    loaded, expected = torch.load(file), MLP().state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.items())
    assert torch.equal(copy.deepcopy(model)(x), model(x))


@split_and_resident
def test_a_device_is_refused_for_a_second_model(memory: dict) -> None:
    """An error of one model would stop the lanes of both, and its memory is counted for one."""
    device = fast_device()
    handle = dispatch_model(MLP(), memory, device)
    with pytest.raises(ValueError, match="device is that of another model.*a ShapedDevice of its"):
        dispatch_model(MLP(), memory, device)
    handle.remove()
    dispatch_model(MLP(), memory, device).remove()
