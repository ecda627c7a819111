"""What is refused: values of another type, and what a split model cannot do rightly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.hetegen.models import Plain, fast_device
from wf_backends.hetegen import Accelerator, ShapedDevice, dispatch_model
from wf_backends.hetegen.split_model import SplitWeight

SPLIT = {0: 30_000}
FITS = {0: "1MB"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"max_memory": "20GB"}, r"max_memory must be sizes such as \{0: \"20GB\"\}, got a str"),
        ({"max_memory": None}, "max_memory must be sizes .*got a NoneType"),
        ({"device": "cpu"}, "device must be .*ShapedDevice.*got a str"),
        ({"device": ShapedDevice}, "device must be .*got a type"),
        ({"device": Accelerator}, "device must be .*got a type"),
        ({"device": torch.device("cpu")}, "device must be .*got a device"),
        ({"model": "gpt2"}, "model must be a torch.nn.Module, got a str"),
        ({"model": Plain}, "model must be a torch.nn.Module, got a type"),
        ({"model": Plain().to("meta")}, r"model must be on the CPU, got layers\.0\.weight on meta"),
        ({"alpha": True}, "alpha must be .* got True"),
        ({"alpha": float("nan")}, "alpha must be .* got nan"),
        ({"pin_memory": "no"}, "pin_memory must be True or False, got a str"),
        ({"prompt": 10**400}, "prompt must be at most 1099511627776, got 1000"),
        ({"pin_memory": 1}, "pin_memory must be True or False, got a int"),
    ],
)
def test_what_is_of_another_type(words: dict[str, Any], told: str) -> None:
    right: dict[str, Any] = {"model": Plain(), "max_memory": SPLIT, "device": fast_device()}
    with pytest.raises(ValueError, match=told):
        dispatch_model(**right | words)


@pytest.mark.parametrize("value", ["a", None, True, 0, -1.0, float("nan")])
@pytest.mark.parametrize("place", range(3))
def test_a_rate_that_is_none(place: int, value: Any) -> None:
    rates: list[Any] = [1e8, 2e8, 1e10]
    rates[place] = value
    with pytest.raises(ValueError, match=f"{('link', 'host', 'accelerator')[place]} must be a pos"):
        ShapedDevice(*rates)


@pytest.mark.parametrize("value", ["a", None, True, -1.0, float("nan"), float("inf")])
def test_seconds_that_are_none(value: Any) -> None:
    with pytest.raises(ValueError, match="call_seconds must be at least 0 seconds, got"):
        ShapedDevice(1e8, 2e8, 1e10, value)


@pytest.mark.filterwarnings("ignore:the model takes")
@pytest.mark.parametrize("memory", [SPLIT, FITS])
def test_a_model_is_split_once(memory: Any) -> None:
    """Nor a part of it, nor what holds it; `remove` lets it be split again."""
    model, x = Plain(), torch.randn(2, 64)
    with torch.no_grad():
        expected = model(x)
        handle = dispatch_model(model, memory, fast_device())
        for other in (model, model.layers[0], nn.Sequential(model)):
            with pytest.raises(ValueError, match=r"model is split already.*handle\.remove\(\)"):
                dispatch_model(other, memory, fast_device())
        torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-5)
        handle.remove()
        assert torch.equal(model(x), expected)
        dispatch_model(model, memory, fast_device()).remove()
        assert vars(model).keys() == vars(Plain()).keys()


@pytest.mark.filterwarnings("ignore:the model takes")
@pytest.mark.parametrize("memory", [SPLIT, FITS])
@pytest.mark.parametrize("assign", [False, True])
def test_weights_are_not_loaded_into_a_split_model(memory: Any, assign: bool) -> None:
    """Copies on the accelerator would keep the old ones, or `remove` would bring them back."""
    model, x = Plain(), torch.randn(2, 64)
    other = {name: value + 1 for name, value in model.state_dict().items()}
    with torch.no_grad():
        expected = model(x)
        handle = dispatch_model(model, memory, fast_device())
        with pytest.raises(ValueError, match=r"Plain is split .*handle\.remove\(\) first"):
            model.load_state_dict(other, assign=assign)
        with pytest.raises(ValueError, match=r"Linear is split .*handle\.remove\(\) first"):
            model.layers[1].load_state_dict(nn.Linear(64, 64).state_dict(), assign=assign)
        torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-5)
        handle.remove()
        assert torch.equal(model(x), expected)
        model.load_state_dict(other, assign=assign)
        assert torch.equal(model.layers[1].bias, other["layers.1.bias"])


class Tied(nn.Module):
    """An embedding, and a head with its weight."""

    def __init__(self, max_norm: float | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(96, 64, max_norm=max_norm)
        self.body = Plain(2)
        self.head = nn.Linear(64, 96, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.table(ids)))


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_an_embedding_that_rescales_its_rows_is_not_split(max_norm: float | None) -> None:
    model, ids = Tied(max_norm), torch.arange(8)[None]
    with torch.no_grad():
        expected = Tied(max_norm)(ids)
        with dispatch_model(model, {0: 45_000}, fast_device()):
            assert isinstance(model.head.weight, SplitWeight) == (max_norm is None)
            for _ in range(2):
                torch.testing.assert_close(model(ids), expected, rtol=0, atol=1e-5)


def test_autocast_to_another_type_is_refused() -> None:
    """Outside, and to the weights' own type, outputs are those of the model that is not split."""
    model, x = Plain(), torch.randn(2, 64)
    with torch.no_grad(), dispatch_model(model, SPLIT, fast_device()):
        with torch.autocast("cpu", torch.bfloat16):
            with pytest.raises(NotImplementedError, match=r"float32.*autocast.*bfloat16"):
                model(x)
        torch.testing.assert_close(model(x), Plain()(x), rtol=0, atol=1e-5)
    half = Plain().to(torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = half(x)
        with dispatch_model(half, {0: 15_000}, fast_device()):
            out = half(x)
    assert out.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=0, atol=0.02)


def test_autocast_leaves_float64_alone() -> None:
    model, x = Plain().double(), torch.randn(2, 64, dtype=torch.float64)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        with dispatch_model(model, {0: 60_000}, fast_device()):
            out = model(x)
    assert out.dtype == expected.dtype == torch.float64
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def test_a_gradient_of_the_weights_is_not_left_out() -> None:
    """Without a bias nothing else would say that it is missing."""
    model, x = nn.Sequential(nn.Linear(64, 64, bias=False)), torch.randn(1, 64)
    with dispatch_model(model, {0: 9_000}, fast_device()):
        with pytest.raises(NotImplementedError, match=r"under torch\.no_grad\(\)"):
            model(x)
        model.requires_grad_(False)
        assert not model(x).requires_grad


@pytest.mark.parametrize("wrong", [torch.ones(2, 63), torch.ones(2, 64).double(), torch.ones(())])
def test_an_input_that_does_not_fit_is_named_before_any_lane_works(wrong: torch.Tensor) -> None:
    model, x = Plain(), torch.randn(2, 64)
    with torch.no_grad(), dispatch_model(model, SPLIT, fast_device()) as handle:
        model(x)
        before = handle.report()["lanes"]["link"]["predicted_busy_seconds"]  # of what was asked for
        with pytest.raises(
            ValueError, match=r"layers\.0 takes an input \(\.\.\., 64\) of .*32, got"
        ):
            model(wrong)
        torch.testing.assert_close(model(x), Plain()(x), rtol=0, atol=1e-5)
        after = handle.report()["lanes"]["link"]["predicted_busy_seconds"]
        assert after <= 2.001 * before  # slabs were not lost


def test_what_transforms_of_torch_would_take_apart() -> None:
    model, x = Plain(), torch.randn(2, 64)
    with torch.no_grad(), dispatch_model(model, SPLIT, fast_device()):
        for transform in (torch.vmap(model), lambda x: torch.func.jvp(model, (x,), (x,))):
            with pytest.raises(NotImplementedError, match=r"a split linear under torch\.vmap.*jvp"):
                transform(x)


def test_an_input_on_another_device_is_named() -> None:
    model = Plain()
    with torch.no_grad(), dispatch_model(model, SPLIT, fast_device()):
        with pytest.raises(ValueError, match=r"layers\.0 takes an input on cpu, got meta"):
            model(torch.ones(2, 64, device="meta"))


class Twofold(Tensor):
    """A weight that is not what its memory says, as quantized ones are."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func == torch.nn.functional.linear:
            x, weight, bias = args
            return func(x, 2 * weight.as_subclass(Tensor), bias)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_weights_that_are_not_plain_are_left_whole() -> None:
    def make() -> Plain:
        model = Plain()
        weight = model.layers[1].weight.detach().as_subclass(Twofold)
        model.layers[1].weight = nn.Parameter(weight, requires_grad=False)
        return model

    model, x = make(), torch.randn(2, 64)
    with torch.no_grad():
        expected = make()(x)
        with dispatch_model(model, {0: 60_000}, fast_device()) as handle:
            assert len(handle.plan.splits) == 3
            torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-5)
