"""The block "autochunk" of a config: its values, its refusals, what it tiles under accelerate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from accelerate import Accelerator  # noqa: E402
from torch import nn  # noqa: E402
from transformers import T5Config, T5ForConditionalGeneration  # noqa: E402

import wf_accelerate  # noqa: E402
from tests.autochunk.tiling.helpers import tiled_modules  # noqa: E402
from tests.integrations.deepspeed_jobs import tiny_llama  # noqa: E402
from tests.integrations.transformers_models import build  # noqa: E402
from wf_transformers import ModelOptions, TrainingBudget, plan_tiles  # noqa: E402
from wf_transformers.memory.checkpoints import Checkpointing  # noqa: E402

ONE_RANK = {"sequence_parallel_size": 1}


def test_block_is_split_into_sequence_parallel_fields_and_a_budget() -> None:
    autochunk = {"max_memory": "8GB", "seqlen": 4096}
    fields, options = ModelOptions.split({"sequence_parallel_size": 2, "autochunk": autochunk})
    assert fields == {"sequence_parallel_size": 2}
    assert options == ModelOptions(autochunk=TrainingBudget(8 * 10**9, 0.1, 4096))


def test_block_without_autochunk_has_no_budget() -> None:
    assert ModelOptions.split(ONE_RANK) == (ONE_RANK, ModelOptions())


@pytest.mark.parametrize(
    ("autochunk", "expected"),
    [
        ({"max_memory": 0.5}, TrainingBudget(0.5, 0.1, None)),
        ({}, TrainingBudget(None, 0.1, None)),
    ],
    ids=["share", "defaults"],
)
def test_budget_of_a_share_and_defaults(
    autochunk: dict[str, Any], expected: TrainingBudget
) -> None:
    assert TrainingBudget.from_dict(autochunk) == expected


@pytest.mark.parametrize(
    ("autochunk", "message"),
    [
        (True, '"autochunk" must be a block such as .*, got True'),
        ({"max_memori": "8GB"}, '"autochunk.max_memori" is an unknown key; did you mean .max_mem'),
        ({"max_memory": "8 apples"}, '"autochunk.max_memory" must be a number of bytes or a size'),
        ({"max_memory": 1.5}, '"autochunk.max_memory" as a float is a share .* between 0 and 1'),
        ({"max_memory": True}, '"autochunk.max_memory" must be a number of bytes'),
        ({"max_slowdown": float("nan")}, '"autochunk.max_slowdown" must be .* 0 or more, got nan'),
        ({"max_slowdown": "little"}, '"autochunk.max_slowdown" must be a number such as 0.1'),
        ({"seqlen": 0}, '"autochunk.seqlen" must be a positive integer, got 0'),
    ],
)
def test_wrong_block_is_refused_by_key(autochunk: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelOptions.split(ONE_RANK | {"autochunk": autochunk})


class TestPlanTiles:
    def test_without_a_budget_nothing_is_planned(self) -> None:
        assert plan_tiles(tiny_llama(1), None, 1) is None

    def test_model_without_a_cache_has_a_plan(self) -> None:
        model = build("bert", "eager", {})
        assert plan_tiles(model, TrainingBudget(), 1) is not None

    def test_model_of_another_library_is_refused(self) -> None:
        with pytest.raises(NotImplementedError, match="needs a Hugging Face model .* Linear is n"):
            plan_tiles(nn.Linear(2, 2), TrainingBudget(seqlen=64), 1)

    def test_model_with_tokens_of_a_decoder_is_refused(self) -> None:
        model = T5ForConditionalGeneration(T5Config(d_model=8, d_kv=2, d_ff=8, num_layers=1))
        with pytest.raises(NotImplementedError, match="T5ForConditionalGeneration .*decoder_input"):
            plan_tiles(model, TrainingBudget(seqlen=64), 1)

    def test_parameters_that_zero_init_partitioned_are_refused(self) -> None:
        model = tiny_llama(1)
        model.lm_head.weight.ds_id = 0  # as deepspeed.zero.Init leaves them
        with pytest.raises(NotImplementedError, match="outside deepspeed.zero.Init"):
            plan_tiles(model, TrainingBudget(seqlen=64), 1)

    def test_plan_is_for_all_samples_of_a_micro_batch(self) -> None:
        one, four = (
            plan_tiles(tiny_llama(1), TrainingBudget(seqlen=256, batch_size=batch_size), 1)
            for batch_size in (None, 4)
        )
        assert one and four
        assert four.peak_before == pytest.approx(4 * one.peak_before, rel=0.1)

    def test_checkpoints_of_the_block_count_in_the_plan(self) -> None:
        model, budget = tiny_llama(3), TrainingBudget(seqlen=256)
        attributes = [dict(vars(module)) for module in model.modules()]
        kept, inputs_kept, offloaded = (
            plan_tiles(model, budget, 1, checkpointing=checkpointing)
            for checkpointing in (None, Checkpointing(), Checkpointing(offload=True))
        )
        assert kept and inputs_kept and offloaded
        inputs = 3 * 256 * model.config.hidden_size * 4  # bytes in float32, of 3 layers
        assert inputs_kept.peak_before < kept.peak_before / 2
        assert offloaded.peak_before == pytest.approx(inputs_kept.peak_before - inputs, rel=0.1)
        assert [dict(vars(module)) for module in model.modules()] == attributes

    def test_refused_budget_leaves_every_module_in_its_mode(self) -> None:
        model = tiny_llama(1).train()
        model.model.eval()
        with pytest.raises(ValueError, match="is too little for a training step"):
            plan_tiles(model, TrainingBudget(10, seqlen=64), 1)
        assert model.training and not any(module.training for module in model.model.modules())


def with_lora(model: Any) -> Any:
    peft = pytest.importorskip("peft", reason="PEFT is not installed", exc_type=ImportError)
    modules = ["up_proj", "down_proj"]
    adapter = peft.LoraConfig(r=2, target_modules=modules, init_lora_weights=False)
    return peft.get_peft_model(model, adapter)


@pytest.mark.parametrize("wrapped", [lambda model: model, with_lora], ids=["plain", "lora"])
def test_accelerate_tiles_the_mlps_with_the_models_loss_and_gradients(wrapped: Any) -> None:
    llama = tiny_llama(2, intermediate_size=160)
    model = wrapped(llama)
    ids = torch.randint(32, (2, 24), generator=torch.Generator().manual_seed(0))

    def loss_and_gradients() -> tuple[torch.Tensor, list[torch.Tensor]]:
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in model.parameters() if p.requires_grad]

    expected_loss, expected_grads = loss_and_gradients()
    config = ONE_RANK | {"autochunk": {"max_slowdown": 0.5, "seqlen": 256}}
    with wf_accelerate.connect(model, Accelerator(cpu=True), config):
        assert tiled_modules(llama) == ["model.layers.0.mlp", "model.layers.1.mlp"]
        loss, grads = loss_and_gradients()
        torch.testing.assert_close(loss, expected_loss)
        torch.testing.assert_close(grads, expected_grads, rtol=1e-4, atol=1e-6)
    assert tiled_modules(llama) == []
