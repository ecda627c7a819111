"""What a split model cannot do correctly is refused, before it is split or before it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.hetegen.models import (
    MLP,
    MLP_SPLIT,
    fast_device,
    make_model,
    max_memory,
    split_and_resident,
)
from wf_backends.hetegen import Accelerator, ShapedDevice, dispatch_model
from wf_backends.hetegen.split_model import SplitWeight


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_memory": "20GB"}, r"max_memory must be sizes such as \{0: \"20GB\"\}, got a str"),
        ({"max_memory": None}, "max_memory must be sizes .*got a NoneType"),
        ({"device": "cpu"}, "device must be .*ShapedDevice.*got a str"),
        ({"device": ShapedDevice}, "device must be .*got a type"),
        ({"device": Accelerator}, "device must be .*got a type"),
        ({"device": torch.device("cpu")}, "device must be .*got a device"),
        ({"model": "gpt2"}, "model must be a torch.nn.Module, got a str"),
        ({"model": MLP}, "model must be a torch.nn.Module, got a type"),
        ({"model": MLP().to("meta")}, r"model must be on the CPU, got layers\.0\.weight on meta"),
        ({"model": nn.LayerNorm(8)}, "LayerNorm has nothing to split"),
        ({"alpha": 1.5}, 'alpha must be "auto" or a share from 0 to 1, got 1.5'),
        ({"alpha": "best"}, "alpha must be .* got 'best'"),
        ({"alpha": True}, "alpha must be .* got True"),
        ({"alpha": float("nan")}, "alpha must be .* got nan"),
        ({"prefetch": -1}, "prefetch must be a whole number of at least 0, got -1"),
        ({"batch": 0}, "batch must be a whole number of at least 1, got 0"),
        ({"prompt": 2.0}, "prompt must be a whole number of at least 1, got 2.0"),
        ({"prompt": 10**400}, "prompt must be at most 1099511627776, got 1000"),
        ({"pin_memory": "no"}, 'pin_memory must be True, False or "weights", got a str'),
        ({"pin_memory": 1}, 'pin_memory must be True, False or "weights", got a int'),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    correct: dict[str, Any] = {"model": MLP(), "max_memory": MLP_SPLIT, "device": fast_device()}
    with pytest.raises(ValueError, match=message):
        dispatch_model(**correct | arguments)


@pytest.mark.parametrize("value", ["a", None, True, 0, -1.0, float("nan")])
@pytest.mark.parametrize(("index", "lane"), [(0, "link"), (1, "host"), (2, "accelerator")])
def test_rates_of_a_shaped_device_that_are_not_positive_are_refused(
    index: int, lane: str, value: Any
) -> None:
    rates: list[Any] = [1e8, 2e8, 1e10]
    rates[index] = value
    with pytest.raises(ValueError, match=f"{lane} must be a pos"):
        ShapedDevice(*rates)


@pytest.mark.parametrize("value", ["a", None, True, -1.0, float("nan"), float("inf")])
def test_call_seconds_that_are_negative_or_not_finite_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="call_seconds must be at least 0 seconds, got"):
        ShapedDevice(1e8, 2e8, 1e10, value)


@split_and_resident
def test_a_model_its_parts_and_its_parents_are_not_split_again_before_remove(memory: Any) -> None:
    model, x = MLP(), torch.randn(2, 64)
    with torch.no_grad():
        expected = model(x)
        handle = dispatch_model(model, memory, fast_device())
        for module in (model, model.layers[0], nn.Sequential(model)):
            with pytest.raises(ValueError, match=r"model is split already.*handle\.remove\(\)"):
                dispatch_model(module, memory, fast_device())
        torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-5)
        handle.remove()
        assert torch.equal(model(x), expected)
        dispatch_model(model, memory, fast_device()).remove()
        assert vars(model).keys() == vars(MLP()).keys()


@split_and_resident
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_weights_are_not_loaded_into_a_split_model(memory: Any, assign: bool) -> None:
    """The accelerator would keep copies of the old weights, or `remove` would restore them."""
    model, x = MLP(), torch.randn(2, 64)
    state = {name: value + 1 for name, value in model.state_dict().items()}
    with torch.no_grad():
        expected = model(x)
        handle = dispatch_model(model, memory, fast_device())
        with pytest.raises(ValueError, match=r"MLP is split .*handle\.remove\(\) first"):
            model.load_state_dict(state, assign=assign)
        with pytest.raises(ValueError, match=r"Linear is split .*handle\.remove\(\) first"):
            model.layers[1].load_state_dict(nn.Linear(64, 64).state_dict(), assign=assign)
        torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-5)
        handle.remove()
        assert torch.equal(model(x), expected)
        model.load_state_dict(state, assign=assign)
        assert torch.equal(model.layers[1].bias, state["layers.1.bias"])


def test_a_split_model_does_not_get_another_number_of_tokens() -> None:
    """The head would be new, and `remove` would restore the old embedding beside it."""
    model: Any = make_model("llama")
    handle = dispatch_model(model, max_memory(model, 0.5), fast_device())
    with pytest.raises(ValueError, match=r"handle\.remove\(\) first.*resize_token_embeddings"):
        model.resize_token_embeddings(100)
    handle.remove()
    assert "resize_token_embeddings" not in vars(model)


class ScaledEmbedding(nn.Embedding):
    """As in Gemma 3 and BART."""

    def forward(self, ids: Tensor) -> Tensor:
        return 4.0 * super().forward(ids)


class TiedModel(nn.Module):
    """An embedding, and a head with the same weight."""

    def __init__(self, embedding_class: type[nn.Embedding], max_norm: float | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = embedding_class(96, 64, max_norm=max_norm)
        self.mlp = MLP(2)
        self.head = nn.Linear(64, 96, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.mlp(self.embedding(ids)))


@pytest.mark.parametrize(
    ("embedding_class", "max_norm"),
    [(nn.Embedding, None), (ScaledEmbedding, None), (nn.Embedding, 1.0)],
)
def test_a_head_is_split_unless_its_embedding_has_max_norm_and_writes_to_the_weight(
    embedding_class: type[nn.Embedding], max_norm: float | None
) -> None:
    model, ids = TiedModel(embedding_class, max_norm), torch.arange(8)[None]
    with torch.no_grad():
        expected = TiedModel(embedding_class, max_norm)(ids)
        with dispatch_model(model, {0: 45_000}, fast_device()):
            assert isinstance(model.head.weight, SplitWeight) == (max_norm is None)
            for _ in range(2):
                torch.testing.assert_close(model(ids), expected, rtol=0, atol=1e-5)


def test_autocast_to_another_dtype_than_the_weights_is_refused() -> None:
    model, x = MLP(), torch.randn(2, 64)
    with torch.no_grad(), dispatch_model(model, MLP_SPLIT, fast_device()):
        with torch.autocast("cpu", torch.bfloat16):
            with pytest.raises(NotImplementedError, match=r"float32.*autocast.*bfloat16"):
                model(x)
        torch.testing.assert_close(model(x), MLP()(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "input_dtype", "memory", "atol"),
    [
        (torch.bfloat16, torch.float32, {0: 15_000}, 0.02),  # values up to 1, rounded to 2**-9
        (torch.float64, torch.float64, {0: 60_000}, 1e-12),  # which autocast leaves alone
    ],
    ids=["bfloat16", "float64"],
)
def test_outputs_are_exact_under_autocast_that_does_not_change_the_weights_dtype(
    dtype: torch.dtype,
    input_dtype: torch.dtype,
    memory: dict[int | str, int | str],
    atol: float,
) -> None:
    model, x = MLP().to(dtype), torch.randn(2, 64, dtype=input_dtype)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        with dispatch_model(model, memory, fast_device()):
            out = model(x)
    assert out.dtype == expected.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=0, atol=atol)


def test_a_gradient_of_the_input_is_refused() -> None:
    model = MLP().requires_grad_(False)
    with dispatch_model(model, MLP_SPLIT, fast_device()):
        with pytest.raises(NotImplementedError, match=r"under torch\.no_grad\(\)"):
            model(torch.randn(1, 64, requires_grad=True))


def test_a_gradient_of_the_weight_is_refused() -> None:
    """Without a bias no other tensor would require one."""
    model, x = nn.Sequential(nn.Linear(64, 64, bias=False)), torch.randn(1, 64)
    with dispatch_model(model, {0: 9_000}, fast_device()):
        with pytest.raises(NotImplementedError, match=r"under torch\.no_grad\(\)"):
            model(x)
        model.requires_grad_(False)
        assert not model(x).requires_grad


@pytest.mark.parametrize(
    "wrong_x",
    [torch.ones(2, 63), torch.ones(2, 64).double(), torch.ones(())],
    ids=["width", "dtype", "scalar"],
)
def test_a_wrong_input_is_refused_before_any_lane_works(wrong_x: torch.Tensor) -> None:
    model, x = MLP(), torch.randn(2, 64)
    with torch.no_grad(), dispatch_model(model, MLP_SPLIT, fast_device()) as handle:
        model(x)
        link_seconds = handle.report()["lanes"]["link"]["predicted_busy_seconds"]
        with pytest.raises(
            ValueError, match=r"layers\.0 takes an input \(\.\.\., 64\) of .*32, got"
        ):
            model(wrong_x)
        torch.testing.assert_close(model(x), MLP()(x), rtol=0, atol=1e-5)
        # What was in the slabs was not copied again.
        assert handle.report()["lanes"]["link"]["predicted_busy_seconds"] <= 2.001 * link_seconds


def test_an_input_on_another_device_is_refused() -> None:
    model = MLP()
    with torch.no_grad(), dispatch_model(model, MLP_SPLIT, fast_device()):
        with pytest.raises(ValueError, match=r"layers\.0 takes an input on cpu, got meta"):
            model(torch.ones(2, 64, device="meta"))


@pytest.mark.parametrize(
    "transform",
    [
        lambda model, x: torch.vmap(model)(x),
        lambda model, x: torch.func.jvp(model, (x,), (x,)),
    ],
    ids=["vmap", "jvp"],
)
def test_function_transforms_of_torch_are_refused(
    transform: Callable[[nn.Module, Tensor], object],
) -> None:
    model, x = MLP(), torch.randn(2, 64)
    with torch.no_grad(), dispatch_model(model, MLP_SPLIT, fast_device()):
        with pytest.raises(NotImplementedError, match=r"a split linear under torch\.vmap.*jvp"):
            transform(model, x)


class DoublingWeight(Tensor):
    """A weight that counts twice in a linear. As if quantized: its memory is not its value."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func == torch.nn.functional.linear:
            x, weight, bias = args
            return func(x, 2 * weight.as_subclass(Tensor), bias)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_weight_of_a_tensor_subclass_is_not_split() -> None:
    model, x = MLP(), torch.randn(2, 64)
    weight = model.layers[1].weight.detach().as_subclass(DoublingWeight)
    model.layers[1].weight = nn.Parameter(weight, requires_grad=False)
    with torch.no_grad():
        expected = model(x)
        with dispatch_model(model, {0: 60_000}, fast_device()) as handle:
            assert len(handle.plan.splits) == 3
            torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-5)


def test_weight_norm_of_a_split_linear_is_refused_and_the_model_stays_exact() -> None:
    model, x = MLP(), torch.randn(2, 64)
    with torch.no_grad():
        expected = model(x)
        with dispatch_model(model, MLP_SPLIT, fast_device()):
            with pytest.raises(ValueError, match="takes no weight_norm"):
                nn.utils.parametrizations.weight_norm(model.layers[1])
            torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-5)
