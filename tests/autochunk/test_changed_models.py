"""A model that changes after it was planned: outputs equal those of the model as it is now.

The reference is the forward of the changed model itself, without slices.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from tests.autochunk.helpers import ANY_SLOWDOWN, relative_error
from wf_backends.autochunk import autochunk

WIDTH = 16


class Attention(nn.Module):
    """`scale` and `scales` are plain attributes, as PEFT's `_active_adapter` and `scaling`;
    `processor` is a callable one, as in diffusers; `shift` is a weight that may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)
        self.scale, self.scales = 1.0, {"default": 1.0}
        self.processor = torch.tanh
        self.register_buffer("shift", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.out((x @ x.transpose(-1, -2)).softmax(-1) @ x)
        if self.shift is not None:
            hidden = hidden + self.shift
        return self.processor(hidden) * self.scale * self.scales["default"]


def two_layers() -> nn.Sequential:
    return nn.Sequential(Attention(), Attention()).eval()


def hidden_states() -> torch.Tensor:
    return torch.randn(1, 256, WIDTH)


def replace_weight_by_a_wider_one(model: nn.Sequential) -> None:
    model[1].out.weight = nn.Parameter(torch.randn(2 * WIDTH, WIDTH))
    model[1].out.bias = nn.Parameter(torch.randn(2 * WIDTH))


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "no bias": lambda model: setattr(model[0].out, "bias", None),
    "new buffer": lambda model: setattr(model[0], "shift", torch.ones(WIDTH)),
    "number": lambda model: setattr(model[0], "scale", 2.0),
    "number in a dict": lambda model: model[0].scales.update(default=2.0),
    "callable": lambda model: setattr(model[0], "processor", torch.sin),
    "linear": lambda model: setattr(model[0], "out", nn.Linear(WIDTH, WIDTH)),
    "wider linear": lambda model: setattr(model[1], "out", nn.Linear(WIDTH, 2 * WIDTH)),
    "wider weight": replace_weight_by_a_wider_one,
    "forward hook": lambda model: model[0].out.register_forward_hook(lambda _, __, out: out * 2),
    "forward pre-hook": lambda model: model[0].out.register_forward_pre_hook(
        lambda _, args: (args[0] + 1,)
    ),
    "forward": lambda model: setattr(model[0], "forward", torch.tanh),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_submodule_is_used(change: str) -> None:
    model, x = two_layers(), hidden_states()
    chunked = autochunk(model, (x,), max_memory=0.5, max_slowdown=ANY_SLOWDOWN)
    assert chunked.plan.regions
    CHANGES[change](model)
    with torch.no_grad():
        torch.testing.assert_close(chunked(x), model(x), rtol=1e-5, atol=1e-6)


def test_hooks_of_all_modules_see_no_module_inside_and_a_warning_says_so() -> None:
    """As those of torch's FlopCounterMode."""
    x, seen = torch.randn(1, 128, WIDTH), list[type]()
    chunked = autochunk(Attention().eval(), (x,), max_memory=0.5, max_slowdown=ANY_SLOWDOWN)
    hook = register_module_forward_pre_hook(lambda module, _: seen.append(type(module)))
    with hook, torch.no_grad(), pytest.warns(UserWarning, match="hooks of all modules"):
        chunked(x)
    assert Attention in seen and nn.Linear not in seen


def test_weights_that_are_no_longer_tied_are_read_from_both_modules() -> None:
    model, x = two_layers(), hidden_states()
    model[1].out.weight = model[0].out.weight
    chunked = autochunk(model, (x,), max_memory=0.5, max_slowdown=ANY_SLOWDOWN)
    assert chunked.plan.regions
    model[1].out.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    with torch.no_grad():
        torch.testing.assert_close(chunked(x), model(x), rtol=1e-5, atol=1e-6)


class WholeWeight(torch.Tensor):
    """A weight that cannot be sliced, such as a quantized one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.Tensor.narrow
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(cls) if func is torch.Tensor.detach else result


class GatedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, 4096), nn.Linear(WIDTH, 4096)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) * torch.sigmoid(self.gate(x))


def test_weight_that_was_quantized_after_planning_is_not_sliced() -> None:
    model, x = GatedLinear().eval().requires_grad_(False), torch.randn(1, WIDTH)
    chunked = autochunk(model, (x,), max_slowdown=1e4)
    assert chunked.plan.regions
    for linear in (model.up, model.gate):
        linear.weight = nn.Parameter(linear.weight.as_subclass(WholeWeight), requires_grad=False)
    torch.testing.assert_close(chunked(x), model(x))


def write_into_weight(model: nn.Sequential) -> None:
    model[0].weight.mul_(2)


def load_state_dict(model: nn.Sequential) -> None:
    model.load_state_dict({key: value * 0.5 for key, value in model.state_dict().items()})


@pytest.mark.parametrize(
    "change", [write_into_weight, load_state_dict], ids=lambda change: change.__name__
)
def test_weights_of_a_region_are_read_at_every_call(
    change: Callable[[nn.Sequential], None],
) -> None:
    mlp = nn.Linear(WIDTH, 32 * WIDTH), nn.GELU(), nn.Linear(32 * WIDTH, WIDTH)
    model, x = nn.Sequential(*mlp).eval(), hidden_states()
    chunked = autochunk(model, (x,), max_memory=0.5, max_slowdown=ANY_SLOWDOWN)
    assert [(part.first, part.last) for part in chunked.plan.regions] == [("linear", "linear_1")]
    with torch.no_grad():
        out_before = chunked(x)
        change(model)
        assert relative_error(chunked(x), model(x)) < 1e-6
        assert relative_error(chunked(x), out_before) > 0.1


def test_dropout_is_active_after_train_and_inactive_after_eval() -> None:
    model, x = nn.Sequential(Attention(), nn.Dropout(0.5)).eval(), hidden_states()
    chunked = autochunk(model, (x,), max_slowdown=ANY_SLOWDOWN)
    with torch.no_grad():
        expected = chunked(x)
        chunked.train()
        assert 0.4 < (chunked(x) == 0).float().mean() < 0.6
        chunked.eval()
        assert torch.equal(chunked(x), expected)


class AttentionWithDropout(Attention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last_length = x.shape[1]
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


def test_mode_and_attributes_of_the_chunked_model_itself_count() -> None:
    model, x = AttentionWithDropout().eval(), hidden_states()
    chunked = autochunk(model, (x,), max_memory=0.5, max_slowdown=ANY_SLOWDOWN)
    with torch.no_grad():
        expected = chunked(x)
        chunked.scale = 2.0
        torch.testing.assert_close(chunked(x), 2 * expected)
        chunked.train()
        assert 0.4 < (chunked(x) == 0).float().mean() < 0.6
        chunked(x[:, :1])  # runs whole
    assert chunked.last_length == 1


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deepcopy", "pickle"],
)
def test_copy_has_weights_and_a_plan_of_its_own(copied: Callable[[nn.Module], nn.Module]) -> None:
    model, x = two_layers(), hidden_states()
    chunked = autochunk(model, (x,), max_memory=0.5, max_slowdown=ANY_SLOWDOWN)
    other, without_slices = copied(chunked), copied(model)
    with torch.no_grad():
        for parameter in (*other.parameters(), *without_slices.parameters()):
            parameter.mul_(2)
        torch.testing.assert_close(other(x[:, :99]), without_slices(x[:, :99]))
        torch.testing.assert_close(chunked(x), model(x))
    assert other.explain() != chunked.explain()  # type: ignore[operator]


def test_each_autocast_dtype_is_planned_separately() -> None:
    model, x = two_layers(), hidden_states()
    chunked = autochunk(model, (x,), max_memory=0.5, max_slowdown=ANY_SLOWDOWN)
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype=dtype):
                assert chunked(x).dtype == dtype


class SharedModule(nn.Module):
    """A module with two paths, as T5's embedding, and a weight that is tied to another module's."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.encoder = nn.Sequential(self.shared, Attention())
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.shared.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.encoder(self.shared(x)))


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_planning_keeps_parameters_of_a_shared_module(training: bool) -> None:
    model, x = SharedModule().train(training), hidden_states()
    expected = dict(model.named_parameters(remove_duplicate=False))
    chunked = autochunk(model, (x,), max_slowdown=ANY_SLOWDOWN)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    assert list(parameters) == list(expected)
    assert all(parameters[name] is expected[name] for name in expected)
    with torch.no_grad():
        torch.testing.assert_close(chunked(x), model(x))


class CachedTable(nn.Module):
    """The forward stores tables in attributes, as rotary embeddings do (a tensor and a dict), and
    in caches of a method, as Qwen-Image's does, and of an instance, as BEiT's."""

    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor | None = None
        self.table_by_size: dict[int, torch.Tensor] = {}
        self.out = nn.Linear(WIDTH, WIDTH)
        self.positions = functools.cache(torch.arange)

    @functools.lru_cache  # noqa: B019
    def shifts(self, size: int) -> torch.Tensor:
        return self.positions(size)[:, None] / size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[1]
        if self.table is None:
            self.table = torch.arange(size, dtype=x.dtype)[:, None] / size
        if size not in self.table_by_size:
            self.table_by_size[size] = self.table * 2
        x = x + self.table + self.table_by_size[size] + self.shifts(size)
        return self.out((x @ x.transpose(-1, -2)).softmax(-1) @ x)


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_planning_leaves_no_traced_tensors_in_the_model(training: bool) -> None:
    model, x = nn.Sequential(CachedTable(), CachedTable()).train(training), hidden_states()
    chunked = autochunk(model, (x,), max_slowdown=ANY_SLOWDOWN)
    assert model[0].table is None and not model[1].table_by_size
    with torch.no_grad():
        out = chunked(x)
        assert type(out) is torch.Tensor
        torch.testing.assert_close(out, model(x))
        assert type(model[0].table) is torch.Tensor
