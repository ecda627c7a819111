"""Modules called tile by tile: outputs and gradients equal those of the untiled call, in float64.

Memory: of a tiled call only the inputs are kept for the backward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.autochunk.tiling.helpers import (
    BOTH_LAYERS,
    ROWS,
    WIDTH,
    GatedMlp,
    TwoLayers,
    assert_close,
    tiled_modules,
)
from wf_backends.autochunk.tiling import Tiles, tile_modules


class ManyArguments(nn.Module):
    """Two inputs are cut by rows, `scale` is read whole, and a bool; outputs are two tensors with
    gradients, an integer one, and a string."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, y: Tensor, scale: Tensor, *, swap: bool) -> dict[str, Any]:
        first, second = self.a(x) * scale, self.b(x * y)
        pair = (second, first) if swap else (first, second)
        return {"pair": pair, "best": second.argmax(-1), "name": "mixed"}


def gradients(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], steps: int = 1
) -> list[Tensor | None]:
    """Of all parameters, summed over some steps; None for those without."""
    model.zero_grad()
    for _ in range(steps):
        loss(model).backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    "use_reentrant",
    [None, False, True],
    ids=["no checkpoint", "checkpoint", "reentrant checkpoint"],
)
@pytest.mark.parametrize("steps", [1, 2])
def test_outputs_and_gradients_equal_those_of_the_untiled_call(
    use_reentrant: bool | None, steps: int
) -> None:
    model = TwoLayers(use_reentrant).double()
    x = torch.randn(2, ROWS, WIDTH, dtype=torch.float64, requires_grad=True)

    def loss(model: nn.Module) -> Tensor:
        return (model(x) ** 2).sum()

    with torch.no_grad():
        expected_out = model(x)
    expected_grads = gradients(model, loss, steps)
    expected_dx, x.grad = x.grad, None
    with tile_modules(model, BOTH_LAYERS):
        assert_close(gradients(model, loss, steps), expected_grads)
        assert_close([x.grad], [expected_dx])
        with torch.no_grad():
            assert_close([model(x)], [expected_out])


def test_several_inputs_and_outputs() -> None:
    model = nn.Sequential(ManyArguments()).double()
    shapes = [(ROWS, WIDTH), (ROWS, WIDTH), (WIDTH,)]
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]

    def out_and_gradients() -> tuple[dict[str, Any], tuple[Tensor, ...]]:
        out = model[0](*inputs, swap=True)
        loss = (out["pair"][0] ** 2).sum() + out["pair"][1].exp().sum()
        return out, torch.autograd.grad(loss, [*inputs, *model.parameters()])

    expected, expected_grads = out_and_gradients()
    with tile_modules(model, [Tiles("0", 0, 4)]):
        out, grads = out_and_gradients()
    assert_close(grads, expected_grads)
    assert_close(out["pair"], expected["pair"])
    assert torch.equal(out["best"], expected["best"]) and out["name"] == "mixed"


class ComplexOutput(nn.Module):
    """As a rotary embedding that multiplies complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_complex(self.linear(x).unflatten(-1, (-1, 2)))


def test_complex_output_has_its_gradients() -> None:
    model, x = nn.Sequential(ComplexOutput()).double(), torch.randn(ROWS, WIDTH).double()
    expected = gradients(model, lambda m: m(x).abs().sum())
    with tile_modules(model, [Tiles("0", 0, 3)]):
        assert_close(gradients(model, lambda m: m(x).abs().sum()), expected)


def test_frozen_and_tied_parameters_and_unused_outputs() -> None:
    model = nn.Sequential(ManyArguments(), GatedMlp()).double()
    model[1].up.weight = model[1].gate.weight
    model[1].down.weight.requires_grad_(False)
    x, scale = torch.randn(ROWS, WIDTH, dtype=torch.float64), torch.ones(()).double()

    def loss(model: nn.Module) -> Tensor:
        first_output = model[0](x, x, scale, swap=False)["pair"][0]
        return model[1](first_output).sum()

    expected = gradients(model, loss)
    assert expected.count(None) == 3  # weight and bias of ManyArguments.b, and the frozen weight
    with tile_modules(model, [Tiles("0", 0, 2), Tiles("1", 0, 5)]):
        assert_close(gradients(model, loss), expected)


@pytest.mark.parametrize(
    ("num_tiles", "calls"),
    [(1, 1), (2, 2 * 2), (ROWS, 2 * ROWS), (50, 2 * ROWS)],
    ids=["one tile", "two tiles", "a row each", "more than rows"],
)
def test_several_tiles_are_computed_again_in_the_backward_and_a_single_one_is_not(
    num_tiles: int, calls: int
) -> None:
    model = TwoLayers().double()
    x = torch.randn(1, ROWS, WIDTH, dtype=torch.float64)
    expected = gradients(model, lambda m: m(x).sum())
    counted: list[str] = []
    model.layers[0].gate.register_forward_hook(lambda *_: counted.append("call"))
    with tile_modules(model, [Tiles("layers.0", 1, num_tiles)]):
        assert_close(gradients(model, lambda m: m(x).sum()), expected)
    assert len(counted) == calls


@pytest.mark.parametrize("num_tiles", [1, 2])
def test_input_without_rows(num_tiles: int) -> None:
    model = TwoLayers()
    with tile_modules(model, [Tiles("layers.0", 1, num_tiles)]):
        assert model(torch.randn(1, 0, WIDTH)).shape == (1, 0, WIDTH)


def test_hooks_of_parameters_and_modules_run_once_a_step() -> None:
    model, calls = TwoLayers(), list[str]()
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda _, name=name: calls.append(name))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
    for layer in model.layers:
        layer.register_full_backward_hook(lambda *_: calls.append("layer"))
    x = torch.randn(2, ROWS, WIDTH, requires_grad=True)
    with tile_modules(model, BOTH_LAYERS):
        gradients(model, lambda m: m(x).sum())
    names = [name for name, _ in model.named_parameters()]
    assert sorted(calls) == sorted([*names, *names, "layer", "layer"])


def test_backward_computes_with_the_buffers_of_the_forward() -> None:
    class Masked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.mask)

    model, x = nn.Sequential(Masked(WIDTH, WIDTH)).double(), torch.randn(2, ROWS, WIDTH).double()
    model[0].register_buffer("mask", torch.empty(0))

    def loss(model: nn.Module) -> Tensor:
        total = torch.zeros(())
        for factor in (1, 2, 3):
            model[0].mask = torch.full((WIDTH,), factor).double()
            total = total + model(x).square().sum()
        return total

    expected = gradients(model, loss)
    with tile_modules(model, [Tiles("0", 1, 3)]):
        assert_close(gradients(model, loss), expected)


def test_hook_inside_a_tiled_module_may_ask_for_gradients() -> None:
    """transformers' `enable_input_require_grads`: a reentrant checkpoint behind frozen embeddings
    had no backward."""
    model = nn.Sequential(
        nn.Sequential(nn.Embedding(5, WIDTH)), TwoLayers(use_reentrant=True)
    ).double()
    model[0].requires_grad_(False)
    model[0][0].register_forward_hook(lambda _, __, output: output.requires_grad_())
    ids = torch.randint(5, (2, ROWS))
    expected = gradients(model, lambda m: m(ids).square().sum())
    with tile_modules(model, [Tiles("0", 1, 3)]):
        assert_close(gradients(model, lambda m: m(ids).square().sum()), expected)


def test_backward_recomputes_under_the_autocast_of_the_forward() -> None:
    """The backward itself runs outside of autocast. The tolerance, 0.02, is that of bfloat16."""
    model, dtypes = TwoLayers(), list[torch.dtype]()
    x = torch.randn(2, ROWS, WIDTH)

    def loss(model: nn.Module) -> Tensor:
        assert not torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().sum()

    expected = gradients(model, loss)
    for layer in model.layers:
        layer.down.register_forward_hook(lambda _, __, out: dtypes.append(out.dtype))
    with tile_modules(model, BOTH_LAYERS):
        assert_close(gradients(model, loss), expected, 0.02)
    assert len(dtypes) == 2 * (3 + 4) and set(dtypes) == {torch.bfloat16}


def test_gradients_of_many_tiles_are_summed_in_float32() -> None:
    """A sum of 512 tiles in bfloat16, which has 8 bits, would be off by more than 0.01."""
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.rand(1, 1024, 4)
    expected = gradients(model, lambda m: m(x).sum())
    model.bfloat16()
    with tile_modules(model, [Tiles("0", 1, 512)]):
        grads = gradients(model, lambda m: m(x.bfloat16()).sum())
    assert all(grad is not None and grad.dtype == torch.bfloat16 for grad in grads)
    assert_close([grad.float() for grad in grads if grad is not None], expected, 0.01)


def test_tiles_keep_the_state_dict_and_can_be_removed_twice() -> None:
    model = TwoLayers()
    names = list(model.state_dict())
    handle = tile_modules(model, BOTH_LAYERS)
    assert list(model.state_dict()) == names
    assert tiled_modules(model) == ["layers.0", "layers.1"]
    handle.remove()
    assert tiled_modules(model) == []
    handle.remove()


def test_copy_of_a_tiled_model_computes_with_its_own_parameters() -> None:
    model, x = TwoLayers(), torch.randn(1, ROWS, WIDTH)
    with tile_modules(model, BOTH_LAYERS):
        copied = copy.deepcopy(model)
        nn.init.zeros_(copied.layers[0].down.weight)
        assert not torch.equal(copied(x), model(x))
        gradients(copied, lambda m: m(x).sum())
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in copied.parameters())


class SharedModule(nn.Module):
    """A module with two paths: itself, and a part of a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.both = nn.Sequential(self.first, nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.both(self.first(x))


def test_module_with_two_paths_keeps_its_parameters() -> None:
    model, x = nn.Sequential(SharedModule()).double(), torch.randn(2, ROWS, WIDTH).double()
    parameters = list(model.parameters())
    expected = gradients(model, lambda m: m(x).square().sum())
    tile_modules(model, [Tiles("0", 1, 3)])
    assert_close(gradients(model, lambda m: m(x).square().sum()), expected)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


class SavedBytes:
    """Counts the bytes that autograd keeps from a forward for the backward, parameters aside."""

    def __init__(self, model: nn.Module) -> None:
        self.known = {p.data_ptr() for p in model.parameters()}
        self.num_bytes = 0

    def pack(self, x: Tensor) -> Tensor:
        if x.data_ptr() not in self.known:
            self.known.add(x.data_ptr())
            self.num_bytes += x.nbytes
        return x


def test_only_the_input_is_kept_for_the_backward() -> None:
    model, x = GatedMlp(), torch.randn(1, ROWS, WIDTH)
    saved = SavedBytes(model)
    with (
        tile_modules(model, [Tiles("", 1, 3)]),
        torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda x: x),
    ):
        model(x)
    assert saved.num_bytes == x.nbytes
