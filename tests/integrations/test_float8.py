"""Linears of torchao that compute in float8, in training: compared without it, trained with it.

`emulate` rounds to float8 and multiplies in float32: no CPU has a product of float8.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("torchao.float8", reason="torchao is not installed")

from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: E402

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.transformers_models import build, sequence_parallel  # noqa: E402
from tests.integrations.verify_models import (  # noqa: E402
    DIFFERS,
    LocalMean,
    attach_unchecked,
)
from wf_transformers import verify  # noqa: E402

MAX_ROUNDING = 1e-5  # relative, of models in float32


def in_float8(model: Any, recipe: str) -> Any:
    """The model, whose layers' linears compute in float8."""
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    return convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: "layers" in name
    )


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_a_model_in_float8_is_compared_without_it(recipe: str) -> None:
    def rank(comm: Any) -> None:
        model, sp = in_float8(build("llama", "sdpa", {}).float(), recipe), sequence_parallel(comm)
        report = verify(model, sp, lambda: attach_unchecked(model, sp, False), "strict")
        assert report is not None and report.largest < MAX_ROUNDING
        assert not any("forward" in vars(module) for module in model.modules())

    run_threads(2, rank)


def test_a_model_in_float8_that_mixes_tokens_is_refused() -> None:
    def rank(comm: Any) -> None:
        model, sp = in_float8(LocalMean().float(), "tensorwise"), sequence_parallel(comm)
        verify(model, sp, lambda: attach_unchecked(model, sp, False))

    with pytest.raises(NotImplementedError, match=DIFFERS):
        run_threads(2, rank)


def logits_and_gradients(size: int, model: Any, ids: Tensor) -> list[Tensor]:
    """Whole logits, and the gradients of the loss one after another, on `size` ranks."""

    def rank(comm: Any) -> list[Tensor]:
        own, sp = copy.deepcopy(model), sequence_parallel(comm)
        handle = wf_transformers.attach(own, sp)
        local = handle.shard_batch({"input_ids": ids, "labels": ids})
        logits = own(**wf_transformers.forward_kwargs(own, local)).logits
        handle.loss(logits, local["labels"]).backward()  # for a mean over the ranks
        gradients = torch.cat([p.grad.flatten() for p in own.parameters()])
        return [sp.unshard(logits.detach(), 1), sp.sum_over_ranks(gradients) / size]

    return run_threads(size, rank)[0]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_with_gw_hp"])
def test_ranks_train_in_float8_as_one_rank_does(recipe: str) -> None:
    """Scales for each token are the same on ranks. One scale for all tokens is of a rank's own,
    and the difference no larger than that of float8 itself."""
    model = build("llama", "sdpa", {}).float()
    ids = torch.randint(32, (2, 32), generator=torch.Generator().manual_seed(1))
    exact = logits_and_gradients(1, model, ids)
    in_float8(model, recipe)
    alone, on_ranks = (logits_and_gradients(size, model, ids) for size in (1, 2))
    for x, y, z in zip(exact, alone, on_ranks, strict=True):
        rounding, difference = (y - x).norm(), (z - y).norm()
        assert rounding > 1e-3 * x.norm()  # it is float8
        allowed = 1.5 * rounding if recipe == "tensorwise" else MAX_ROUNDING * y.norm()
        assert difference < allowed, (difference, rounding)
