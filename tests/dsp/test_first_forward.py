"""A model whose stages are right but not what lies between them is refused at its first forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import run_threads
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import Communicator
from wf_backends.dsp import DynamicSequenceParallel, Stages, first_forward, spread

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
    """A mean over time and space, between stages."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean((1, 2), keepdim=True)


class LocalPositions(nn.Module):
    """Frames counted from 0 on this rank, between stages."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.arange(x.shape[1], dtype=x.dtype)[:, None, None].sin()


class Model(nn.Module):
    def __init__(self, between: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.space, self.between, self.time = Mix(2), between, Mix(1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.time(self.between(self.dropout(self.space(self.first(x))))))


STAGES: dict[str, Any] = {
    "dims": DIMS,
    "needs": {"space": "space", "time": "time"},
    "enters": "space",
    "starts_along": "time",
    "leaves": "last",
}


def forwards(
    comm: Communicator,
    model: Model,
    shape: tuple[int, ...] = (2, 5, 6, WIDTH),
    verify: Any = True,
    words: Mapping[str, Any] = STAGES,
) -> tuple[Tensor, dict[str, int], bool]:
    """The output of a first forward, the bytes it sent, and whether the model is as it was."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.double().parameters():
            p.copy_(torch.randn(p.shape, generator=random))
    config = SequenceParallelConfig(sequence_parallel_size=comm.size, layout="contiguous")
    sp = SequenceParallel(config, comm)
    dsp = DynamicSequenceParallel(comm, gradients="averaged")
    tracker = spread(model, sp, dsp, Stages(**words), verify)
    out = model(torch.randn(shape, generator=torch.Generator().manual_seed(1)).double())
    out.square().mean().backward()
    tracker.remove()
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    return out, sp.report(), model.training and not any(hooks)


WRONG = {"mean": MeanOverAll, "positions": LocalPositions}


def one_rank(comm: Communicator, kind: str, *more: Any) -> Any:
    between = WRONG.get(kind, nn.Identity)()
    return forwards(comm, Model(between, 0.5 if kind == "dropout" else 0.0), *more)


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("num_ranks", (2, 3))
def test_what_mixes_or_counts_between_stages_is_refused_by_name(kind: str, num_ranks: int):
    with pytest.raises(NotImplementedError, match="the output of between is the first that differ"):
        run_threads(num_ranks, one_rank, kind)


@pytest.mark.parametrize(
    ("leaves", "says"),
    [("first", "'first' ran before 'space'"), ("unused", "ended without 'unused' behind 'space'")],
)
def test_a_model_that_is_not_whole_at_its_end_is_refused(leaves: str, says: str):
    def rank(comm: Communicator) -> Any:
        model = Model(nn.Identity())
        model.unused = nn.Identity()
        return forwards(comm, model, (1, 2, 2, WIDTH), False, STAGES | {"leaves": leaves})

    with pytest.raises(ValueError, match=says):
        run_threads(2, rank)


@pytest.mark.parametrize("kind", WRONG)
def test_without_the_comparison_they_are_silently_wrong(kind: str):
    (found, *_), *_ = run_threads(2, one_rank, kind, (2, 5, 6, WIDTH), False)
    ((right, *_),) = run_threads(1, one_rank, kind)
    assert (found - right).abs().max() > 1e-3 * right.abs().max()


@pytest.mark.parametrize("kind", ("right", "dropout"))
def test_a_right_model_runs_and_nothing_is_left_behind(kind: str):
    verified = run_threads(3, one_rank, kind)
    plain = run_threads(3, one_rank, kind, (2, 5, 6, WIDTH), False)
    for (out, sent, as_before), (right, wanted, _) in zip(verified, plain, strict=True):
        assert as_before and sent == wanted and out.shape == right.shape


def test_ranks_that_keep_fewer_outputs_name_the_same_module(monkeypatch: pytest.MonkeyPatch):
    """One rank has 3 of 5 frames, and keeps the outputs of fewer modules than the other."""
    monkeypatch.setattr(first_forward, "KEPT_BYTES", 5000)
    with pytest.raises(NotImplementedError, match="the output of between is the first that differ"):
        run_threads(2, one_rank, "mean")
