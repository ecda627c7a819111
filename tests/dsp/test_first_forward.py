"""The comparison at the first forward refuses a model that mixes or counts positions between its
stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import run_threads
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import Communicator
from wf_backends.dsp import DynamicSequenceParallel, Mode, Stages, first_forward, spread

DIMS = {"time": 1, "space": 2}
WIDTH = 4


class Mix(nn.Module):
    """A residual stage over one dimension of (b, time, space, width)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.linear = dim, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).cumsum(self.dim).tanh()


class MeanOverAll(nn.Module):
    """A residual mean over time and space: between stages each rank would average its shard."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean((1, 2), keepdim=True)


class LocalPositions(nn.Module):
    """Adds a function of the frame's number: between stages each rank would count from 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.arange(x.shape[1], dtype=x.dtype)[:, None, None].sin()


class Model(nn.Module):
    """A stage over space, then dropout and `between`, then a stage over time."""

    def __init__(self, between: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.space, self.between, self.time = Mix(2), between, Mix(1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.time(self.between(self.dropout(self.space(self.first(x))))))


@dataclass
class Output:
    """What a model returns, with its tensor in a dataclass."""

    sample: Tensor

    def square(self) -> Tensor:
        return self.sample.square()


class DataclassModel(Model):
    def forward(self, x: Tensor) -> Output:  # type: ignore[override]
        return Output(super().forward(x))


class Opaque:
    """What a model returns, in which nobody finds a tensor."""

    def __init__(self, sample: Tensor) -> None:
        self.square = sample.square


class OpaqueModel(Model):
    def forward(self, x: Tensor) -> Opaque:  # type: ignore[override]
        return Opaque(super().forward(x))


STAGES: dict[str, Any] = {
    "dims": DIMS,
    "needs": {"space": "space", "time": "time"},
    "enters": "space",
    "starts_along": "time",
    "leaves": "last",
}


MODELS: dict[str, Callable[[], Model]] = {
    "mean": lambda: Model(MeanOverAll()),
    "positions": lambda: Model(LocalPositions()),
    "right": lambda: Model(nn.Identity()),
    "dropout": lambda: Model(nn.Identity(), dropout=0.5),
    "mean, dataclass": lambda: DataclassModel(MeanOverAll()),
    "mean, opaque": lambda: OpaqueModel(MeanOverAll()),
}
WRONG = ("mean", "positions")


def first_step(
    comm: Communicator, name: str, verify: Mode = True
) -> tuple[Tensor, dict[str, int], bool]:
    """A first forward and its backward, with the tracker removed afterwards.

    Returns:
        The output, the bytes sent by label, and whether the model is in training mode and without
        hooks, as before.
    """
    return step_of(comm, MODELS[name](), verify, STAGES)


def step_of(
    comm: Communicator, model: Model, verify: Mode, stages: Mapping[str, Any]
) -> tuple[Tensor, dict[str, int], bool]:
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.double().parameters():
            p.copy_(torch.randn(p.shape, generator=random))
    config = SequenceParallelConfig(sequence_parallel_size=comm.size, layout="contiguous")
    sp = SequenceParallel(config, comm)
    dsp = DynamicSequenceParallel(comm, gradients="averaged")
    tracker = spread(model, sp, dsp, Stages(**stages), verify)
    x = torch.randn(2, 5, 6, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    out = model(x)
    out.square().mean().backward()
    tracker.remove()
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    return out, sp.report(), model.training and not any(hooks)


@pytest.mark.parametrize("name", (*WRONG, "mean, dataclass"))
@pytest.mark.parametrize("num_ranks", (2, 3))
def test_a_module_that_mixes_or_counts_between_stages_is_refused(name: str, num_ranks: int):
    with pytest.raises(NotImplementedError, match="the output of between is the first that differ"):
        run_threads(num_ranks, first_step, name)


def test_a_model_whose_output_has_no_tensors_was_not_verified():
    with pytest.raises(ValueError, match="OpaqueModel was not verified: its output has no tensor"):
        run_threads(2, first_step, "mean, opaque", "strict")


@pytest.mark.parametrize("name", WRONG)
def test_without_the_comparison_the_output_of_such_a_model_is_wrong(name: str):
    (out, *_), *_ = run_threads(2, first_step, name, False)
    ((expected, *_),) = run_threads(1, first_step, name)
    assert (out - expected).abs().max() > 1e-3 * expected.abs().max()


@pytest.mark.parametrize(
    ("leaves", "message"),
    [("first", "'first' ran before 'space'"), ("unused", "ended without 'unused' behind 'space'")],
)
def test_a_model_whose_output_is_not_whole_is_refused(leaves: str, message: str):
    def step(comm: Communicator) -> Any:
        model = Model(nn.Identity())
        model.unused = nn.Identity()
        return step_of(comm, model, False, STAGES | {"leaves": leaves})

    with pytest.raises(ValueError, match=message):
        run_threads(2, step)


@pytest.mark.parametrize("name", ("right", "dropout"))
def test_the_comparison_changes_neither_the_output_nor_the_model(name: str):
    """Nor the bytes that are reported. Dropout draws anew: its output has the same shape."""
    verified, plain = run_threads(3, first_step, name), run_threads(3, first_step, name, False)
    for (out, sent, is_as_before), (plain_out, plain_sent, _) in zip(verified, plain, strict=True):
        assert is_as_before
        assert sent == plain_sent
        assert out.shape == plain_out.shape
        assert name == "dropout" or torch.equal(out, plain_out)


def test_a_copy_of_a_model_is_compared_once():
    """Its hook stays, and compares nothing in its later forwards."""

    def forwards_of_a_copy(comm: Communicator) -> int:
        config = SequenceParallelConfig(sequence_parallel_size=comm.size, layout="contiguous")
        model, sp = Model(nn.Identity()), SequenceParallel(config, comm)
        dsp = DynamicSequenceParallel(comm, gradients="averaged")
        for p in model.parameters():
            nn.init.constant_(p, 0.1)
        spread(model, sp, dsp, Stages(**STAGES), True)
        copy, calls = deepcopy(model), list[int]()
        copy.last.register_forward_hook(lambda *_: calls.append(1))
        for _ in range(2):
            copy(torch.ones(2, 5, 6, WIDTH))
        return len(calls)

    assert run_threads(2, forwards_of_a_copy) == [4, 4]  # two of them compared


def test_ranks_that_keep_fewer_outputs_name_the_same_module(monkeypatch: pytest.MonkeyPatch):
    """One rank has 3 of 5 frames, and keeps the outputs of fewer modules than the other."""
    monkeypatch.setattr(first_forward, "KEPT_BYTES", 5000)
    with pytest.raises(NotImplementedError, match="the output of between is the first that differ"):
        run_threads(2, first_step, "mean")
