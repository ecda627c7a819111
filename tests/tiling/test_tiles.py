"""Modules called tile by tile: results and gradients are those of the whole call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from wf_backends.tiling import Tiles, tile_modules

WIDTH, ROWS = 6, 11


class Gated(nn.Module):
    """A Llama's MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mixed(nn.Module):
    """Two inputs by rows, one whole, words that are no tensors; two results and an integer one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, y: Tensor, scale: Tensor, *, swap: bool) -> dict[str, Any]:
        first, second = self.a(x) * scale, self.b(x * y)
        pair = (second, first) if swap else (first, second)
        return {"pair": pair, "best": second.argmax(-1), "name": "mixed"}


class Around(nn.Module):
    """Two layers with a residual each, the second one under a checkpoint if asked."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Gated(), Gated()])
        self.reentrant = recompute

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.reentrant is None:
                x = x + layer(x)
            else:
                x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class InTwoPlaces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.both = nn.Sequential(self.first, nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.both(self.first(x))


def test_a_module_in_two_places_keeps_its_parameters() -> None:
    model, x = nn.Sequential(InTwoPlaces()).double(), torch.randn(2, ROWS, WIDTH).double()
    parameters = list(model.parameters())
    right = gradients(model, lambda m: m(x).square().sum())
    tile_modules(model, [Tiles("0", 1, 3)])
    close(gradients(model, lambda m: m(x).square().sum()), right)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


MLPS = [Tiles("layers.0", 1, 3), Tiles("layers.1", 1, 4)]


def gradients(model: nn.Module, loss: Callable[[nn.Module], Tensor], steps: int = 1) -> list[Any]:
    model.zero_grad()
    for _ in range(steps):
        loss(model).backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def close(found: list[Any], right: list[Any], tolerance: float = 1e-12) -> None:
    for one, other in zip(found, right, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("recompute", [None, False, True])
@pytest.mark.parametrize("steps", [1, 2])
def test_gradients_are_those_of_the_whole_call(recompute: bool | None, steps: int) -> None:
    torch.manual_seed(0)
    model = Around(recompute).double()
    x = torch.randn(2, ROWS, WIDTH, dtype=torch.float64, requires_grad=True)

    def loss(model: nn.Module) -> Tensor:
        return (model(x) ** 2).sum()

    right = gradients(model, loss, steps)
    right_x, x.grad = x.grad, None
    with tile_modules(model, MLPS):
        close(gradients(model, loss, steps), right)
        close([x.grad], [right_x])
        with torch.no_grad():
            close([model(x)], [tile_free(model)(x)])


def tile_free(model: nn.Module) -> nn.Module:
    free = copy.deepcopy(model)
    for module in free.modules():
        vars(module).pop("forward", None)
    return free


def test_inputs_by_rows_and_whole_and_several_results() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Mixed()).double()
    shapes = [(ROWS, WIDTH), (ROWS, WIDTH), (WIDTH,)]
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]

    def run() -> tuple[Any, list[Any]]:
        out = model[0](*inputs, swap=True)
        loss = (out["pair"][0] ** 2).sum() + out["pair"][1].exp().sum()
        return out, [*torch.autograd.grad(loss, [*inputs, *model.parameters()])]

    right, right_grads = run()
    with tile_modules(model, [Tiles("0", 0, 4)]):
        out, grads = run()
    close(grads, right_grads)
    close([*out["pair"]], [*right["pair"]])
    assert torch.equal(out["best"], right["best"]) and out["name"] == "mixed"


def test_frozen_and_tied_parameters_and_results_that_nobody_uses() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Mixed(), Gated()).double()
    model[1].up.weight = model[1].gate.weight
    model[1].down.weight.requires_grad_(False)
    x, scale = torch.randn(ROWS, WIDTH, dtype=torch.float64), torch.ones(()).double()

    def loss(model: nn.Module) -> Tensor:
        return model[1](model[0](x, x, scale, swap=False)["pair"][0]).sum()

    right = gradients(model, loss)
    assert right.count(None) == 3  # of Mixed.b, and what is frozen
    with tile_modules(model, [Tiles("0", 0, 2), Tiles("1", 0, 5)]):
        close(gradients(model, loss), right)


@pytest.mark.parametrize("tiles", [1, 2, ROWS, 50])
def test_any_number_of_tiles(tiles: int) -> None:
    torch.manual_seed(0)
    model = Around().double()
    x = torch.randn(1, ROWS, WIDTH, dtype=torch.float64)
    right = gradients(model, lambda m: m(x).sum())
    calls: list[int] = []
    model.layers[0].gate.register_forward_hook(lambda *_: calls.append(1))
    with tile_modules(model, [Tiles("layers.0", 1, tiles)]):
        close(gradients(model, lambda m: m(x).sum()), right)
        assert len(calls) == (1 if tiles == 1 else 2 * {2: 2}.get(tiles, ROWS))
        assert model(x[:, :0]).shape == (1, 0, WIDTH)


def test_what_hangs_on_a_parameter_runs_once_a_step() -> None:
    torch.manual_seed(0)
    model, fired = Around(), list[str]()
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda _, name=name: fired.append(name))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    for layer in model.layers:
        layer.register_full_backward_hook(lambda *_: fired.append("layer"))
    x = torch.randn(2, ROWS, WIDTH, requires_grad=True)
    with tile_modules(model, MLPS):
        gradients(model, lambda m: m(x).sum())
    names = [name for name, _ in model.named_parameters()]
    assert sorted(fired) == sorted([*names, *names, "layer", "layer"])


def test_autocast_is_the_same_in_the_backward() -> None:
    torch.manual_seed(0)
    model, seen = Around(), list[torch.dtype]()
    x = torch.randn(2, ROWS, WIDTH)

    def loss(model: nn.Module) -> Tensor:
        assert not torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().sum()

    right = gradients(model, loss)
    for layer in model.layers:
        layer.down.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    with tile_modules(model, MLPS):
        close(gradients(model, loss), right, 0.02)
    assert set(seen) == {torch.bfloat16}


def test_a_sum_of_many_tiles_does_not_drift_in_16_bits() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.rand(1, 1024, 4)
    right = gradients(model, lambda m: m(x).sum())
    model.bfloat16()
    with tile_modules(model, [Tiles("0", 1, 512)]):
        found = gradients(model, lambda m: m(x.bfloat16()).sum())
    close([g.float() for g in found], right, 0.01)
    assert {g.dtype for g in found} == {torch.bfloat16}


def test_a_copy_has_its_own_parameters_and_the_state_dict_stays() -> None:
    torch.manual_seed(0)
    model = Around()
    names, x = list(model.state_dict()), torch.randn(1, ROWS, WIDTH)
    handle = tile_modules(model, MLPS)
    assert list(model.state_dict()) == names and "forward" in vars(model.layers[0])
    twin = copy.deepcopy(model)
    nn.init.zeros_(twin.layers[0].down.weight)
    assert not torch.equal(twin(x), model(x))
    gradients(twin, lambda m: m(x).sum())
    assert all(p.grad is None for p in model.parameters())
    handle.remove()
    assert "forward" not in vars(model.layers[0])
    handle.remove()


class Saved:
    """The bytes that autograd keeps from a forward for the backward, parameters aside."""

    def __init__(self, model: nn.Module) -> None:
        self.known = {p.data_ptr() for p in model.parameters()}
        self.bytes = 0

    def pack(self, x: Tensor) -> Tensor:
        if x.data_ptr() not in self.known:
            self.known.add(x.data_ptr())
            self.bytes += x.nbytes
        return x


def test_only_the_inputs_are_kept() -> None:
    model, x = Gated(), torch.randn(1, ROWS, WIDTH)
    kept = Saved(model)
    with (
        tile_modules(model, [Tiles("", 1, 3)]),
        torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda x: x),
    ):
        model(x)
    assert kept.bytes == x.nbytes


def test_wrong_tiles_are_refused() -> None:
    model = Around()
    with pytest.raises(ValueError, match="module 'layer' is none of this Around"):
        tile_modules(model, [Tiles("layer", 1, 2)])
    with pytest.raises(ValueError, match="tiles must be a positive integer, got 0"):
        tile_modules(model, [Tiles("layers.0", 1, 0)])
    with pytest.raises(ValueError, match="dim must be counted from the first, 0 or more, got -1"):
        tile_modules(model, [Tiles("layers.0", -1, 2)])
    assert "forward" not in vars(model.layers[0])


class Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1, keepdim=True)


def test_results_that_are_no_rows_are_refused() -> None:
    model = nn.Sequential(Pooled())
    with (
        tile_modules(model, [Tiles("0", 1, 2)]),
        pytest.raises(NotImplementedError, match=r"6 rows gave \(1, 1, 3\)"),
    ):
        model(torch.randn(1, ROWS, 3))
    with (
        tile_modules(model, [Tiles("0", 5, 2)]),
        pytest.raises(ValueError, match="no argument of a tiled module has a dim 5"),
    ):
        model(torch.randn(1, ROWS, 3))


def test_parts_that_are_gathered_on_their_own_are_refused() -> None:
    model = Around()
    model.layers[0].gate.ds_id = 3  # as DeepSpeed's ZeRO 3 marks a module that it hooks
    with (
        tile_modules(model, MLPS),
        pytest.raises(NotImplementedError, match="ZeRO 3 would gather 'gate' of a tiled Gated"),
    ):
        model(torch.randn(1, ROWS, WIDTH))


def test_parameters_that_somebody_took_away_are_refused() -> None:
    model = Around()
    with tile_modules(model, MLPS):
        del model.layers[0].gate.weight  # as FSDP 1 does, which leaves plain tensors
        model.layers[0].gate.weight = torch.zeros(2 * WIDTH, WIDTH)
        with pytest.raises(NotImplementedError, match="module.gate.weight' is no parameter of"):
            model(torch.randn(1, ROWS, WIDTH))
