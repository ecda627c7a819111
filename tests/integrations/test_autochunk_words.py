"""The words "autochunk" of a block: refused by name, and what they tile under accelerate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from accelerate import Accelerator  # noqa: E402
from torch import nn  # noqa: E402

import wf_accelerate  # noqa: E402
from tests.integrations.deepspeed_jobs import tiny_llama  # noqa: E402
from wf_transformers import ModelOptions, TrainingBudget, plan_tiles  # noqa: E402

ONE = {"sequence_parallel_size": 1}


def test_what_the_words_say() -> None:
    words = {"sequence_parallel_size": 2, "autochunk": {"max_memory": "8GB", "seqlen": 4096}}
    budget = TrainingBudget(8 * 10**9, 0.1, 4096)
    assert ModelOptions.split(words) == (
        {"sequence_parallel_size": 2},
        ModelOptions(autochunk=budget),
    )
    assert ModelOptions.split(ONE) == (ONE, ModelOptions())
    assert TrainingBudget.from_dict({"max_memory": 0.5}).max_memory == 0.5
    assert TrainingBudget.from_dict({}) == TrainingBudget(None, 0.1, None)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (True, '"autochunk" must be a block such as .*, got True'),
        ({"max_memori": "8GB"}, '"autochunk.max_memori" is no known key; did you mean .max_mem'),
        ({"max_memory": "8 apples"}, '"autochunk.max_memory" must be a number of bytes or a size'),
        ({"max_memory": 1.5}, '"autochunk.max_memory" as a float is a share .* between 0 and 1'),
        ({"max_memory": True}, '"autochunk.max_memory" must be a number of bytes'),
        ({"max_slowdown": float("nan")}, '"autochunk.max_slowdown" must be .* 0 or more, got nan'),
        ({"max_slowdown": "little"}, '"autochunk.max_slowdown" must be a number such as 0.1'),
        ({"seqlen": 0}, '"autochunk.seqlen" must be a positive integer, got 0'),
    ],
)
def test_wrong_words_are_refused_by_name(words: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ModelOptions.split(ONE | {"autochunk": words})


def test_models_that_cannot_be_planned_are_refused() -> None:
    budget = TrainingBudget(seqlen=64)
    with pytest.raises(NotImplementedError, match="needs a Hugging Face model .* Linear is none"):
        plan_tiles(nn.Linear(2, 2), budget, 1)
    model = tiny_llama(1)
    model.lm_head.weight.ds_id = 0  # as deepspeed.zero.Init leaves them
    with pytest.raises(NotImplementedError, match="outside deepspeed.zero.Init"):
        plan_tiles(model, budget, 1)
    assert plan_tiles(model, None, 1) is None
    model = tiny_llama(1)
    with pytest.raises(ValueError, match="is too little for a training step"):
        plan_tiles(model.eval(), TrainingBudget(10, seqlen=64), 1)
    assert not model.training


def test_accelerate_tiles_what_the_model_computes() -> None:
    model = tiny_llama(2, intermediate_size=160)
    ids = torch.randint(32, (2, 24), generator=torch.Generator().manual_seed(0))

    def loss() -> torch.Tensor:
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    right, grads = loss(), [p.grad.clone() for p in model.parameters()]
    words = ONE | {"autochunk": {"max_slowdown": 0.5, "seqlen": 256}}
    with wf_accelerate.connect(model, Accelerator(cpu=True), words):
        tiled = [name for name, module in model.named_modules() if "forward" in vars(module)]
        assert tiled == ["model.layers.0.mlp", "model.layers.1.mlp"]
        torch.testing.assert_close(loss(), right)
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-6)
    assert not any("forward" in vars(module) for module in model.modules())
