"""A model that is changed after it was planned: the outputs are those of the model as it is now."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from wf_backends.autochunk import autochunk

ANY = 4.0  # slowdown: these models are small, and memory is the matter here
WIDTH = 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out((x @ x.transpose(-1, -2)).softmax(-1) @ x)


def attention() -> nn.Sequential:
    return nn.Sequential(Attention(), Attention()).eval()


def other_linear(model: nn.Sequential) -> None:
    model[0].out = nn.Linear(WIDTH, WIDTH)


def wider(model: nn.Sequential) -> None:
    model[1].out = nn.Linear(WIDTH, 2 * WIDTH)


def weight_of_another_shape(model: nn.Sequential) -> None:
    model[1].out.weight = nn.Parameter(torch.randn(2 * WIDTH, WIDTH))
    model[1].out.bias = nn.Parameter(torch.randn(2 * WIDTH))


def hooked(model: nn.Sequential) -> None:
    model[0].out.register_forward_hook(lambda module, args, output: output * 2)


def pre_hooked(model: nn.Sequential) -> None:
    model[0].out.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def another_forward(model: nn.Sequential) -> None:
    model[0].forward = torch.tanh  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "change",
    [other_linear, wider, weight_of_another_shape, hooked, pre_hooked, another_forward],
)
def test_what_is_changed_inside_is_seen(change: Callable[[nn.Sequential], None]) -> None:
    model, x = attention(), torch.randn(1, 256, WIDTH)
    chunked = autochunk(model, (x,), max_memory=0.5, max_slowdown=ANY)
    assert chunked.plan.regions
    change(model)
    with torch.no_grad():
        torch.testing.assert_close(chunked(x), model(x), rtol=1e-5, atol=1e-6)


def test_a_model_that_is_put_in_training_drops_again() -> None:
    model = nn.Sequential(Attention(), nn.Dropout(0.5)).eval()
    x = torch.randn(1, 256, WIDTH)
    chunked = autochunk(model, (x,), max_slowdown=ANY)
    with torch.no_grad():
        kept = chunked(x)
        chunked.train()
        assert 0.4 < (chunked(x) == 0).float().mean() < 0.6
        chunked.eval()
        assert torch.equal(chunked(x), kept)


def test_autocast_in_another_dtype_is_another_form() -> None:
    model, x = attention(), torch.randn(1, 256, WIDTH)
    chunked = autochunk(model, (x,), max_memory=0.5, max_slowdown=ANY)
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype=dtype):
                assert chunked(x).dtype == dtype


class InTwoPlaces(nn.Module):
    """T5's embedding is a child of the model and of its encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.encoder = nn.Sequential(self.shared, Attention())
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.shared.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.encoder(self.shared(x)))


@pytest.mark.parametrize("training", [False, True])
def test_a_module_in_two_places_keeps_its_weights(training: bool) -> None:
    model, x = InTwoPlaces().train(training), torch.randn(1, 256, WIDTH)
    before = dict(model.named_parameters(remove_duplicate=False))
    chunked = autochunk(model, (x,), max_slowdown=ANY)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(before) == list(after) and all(after[name] is before[name] for name in before)
    with torch.no_grad():
        torch.testing.assert_close(chunked(x), model(x))


class Keeping(nn.Module):
    """Keeps a table, as rotary embeddings do, and one by its size."""

    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor | None = None
        self.by_size: dict[int, torch.Tensor] = {}
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[1]
        if self.table is None:
            self.table = torch.arange(size, dtype=x.dtype)[:, None] / size
        if size not in self.by_size:
            self.by_size[size] = self.table * 2
        x = x + self.table + self.by_size[size]
        return self.out((x @ x.transpose(-1, -2)).softmax(-1) @ x)


@pytest.mark.parametrize("training", [False, True])
def test_what_a_forward_keeps_is_not_what_a_trace_kept(training: bool) -> None:
    model, x = nn.Sequential(Keeping(), Keeping()).train(training), torch.randn(1, 256, WIDTH)
    chunked = autochunk(model, (x,), max_slowdown=ANY)
    assert model[0].table is None and not model[1].by_size
    with torch.no_grad():
        found = chunked(x)
        assert type(found) is torch.Tensor
        torch.testing.assert_close(found, model(x))
        assert type(model[0].table) is torch.Tensor
