"""Models, and models with LoRA, that ColossalAI's plugin or `apply` takes or refuses."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers import run_threads
from tests.integrations.colossalai_jobs import needs_colossalai

if importlib.util.find_spec("colossalai"):
    import transformers
    from colossalai.shardformer.layer.parallel_module import ParallelModule
    from peft import LoraConfig, get_peft_model
    from transformers import T5Config, T5ForConditionalGeneration

    from tests.integrations.colossalai_models import batch, build
    from tests.integrations.transformers_models import sequence_parallel
    from wf_colossalai import (
        TABLE,
        AttentionModule,
        WallFacerPolicy,
        apply,
    )
    from wf_colossalai.attach import attach
    from wf_colossalai.table import find

pytestmark = needs_colossalai


def test_an_unknown_model_is_refused_with_a_list_of_the_known() -> None:
    sizes = {"d_model": 8, "d_ff": 8, "num_layers": 1, "num_heads": 2, "d_kv": 4, "vocab_size": 8}
    with pytest.raises(ValueError, match="T5ForConditionalGeneration.*T5Attention") as refusal:
        find(T5ForConditionalGeneration(T5Config(**sizes)), TABLE)
    for part in ("LlamaAttention", "GPT2Attention", "ViTSelfAttention", "ten lines"):
        assert part in str(refusal.value)


def bloom() -> Any:
    sizes = {"hidden_size": 8, "n_layer": 1, "n_head": 2, "vocab_size": 8}
    return transformers.BloomForCausalLM(transformers.BloomConfig(**sizes))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: build("qwen3"), "ColossalAI has no policy for Qwen3ForCausalLM: set tp_size=1"),
        (bloom, "tensor parallelism of ALiBi .BloomForCausalLM"),
    ],
)
def test_tensor_parallelism_that_would_be_wrong_is_refused(
    model: Callable[[], Any], message: str
) -> None:
    policy: Any = WallFacerPolicy()
    policy.table = TABLE | {"BloomAttention": AttentionModule()}
    policy.set_model(model())
    policy.shard_config = SimpleNamespace(
        sequence_parallelism_mode="ring_attn",
        pipeline_stage_manager=None,
        enable_tensor_parallelism=True,
    )
    with pytest.raises(NotImplementedError, match=message):
        policy.config_sanity_check()


def test_apply_refuses_a_model_that_a_plugin_has_split_by_tensor_parallelism() -> None:
    """`GeminiPlugin(tp_size=2)`; here the group of one layer is made up."""
    model = build("llama")
    apply(model, {"sequence_parallel_size": 1})
    split: Any = model.model.layers[0].mlp.up_proj
    split.__class__ = type("Linear1D_Col", (torch.nn.Linear, ParallelModule), {})
    split.process_group = SimpleNamespace(size=lambda: 2)
    with pytest.raises(NotImplementedError, match="tp_size=2.*layers.0.mlp.up_proj.*tp_size=1"):
        model(**batch("llama", "plain", 0))


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(ValueError, match="LlamaModel is neither.*ForCausalLM"):
        find(transformers.LlamaModel(build("llama").config), TABLE)


def with_lora(family: str, task_type: str | None) -> Any:
    modules = ["q_proj", "v_proj"]
    lora = LoraConfig(task_type=task_type, r=2, target_modules=modules, init_lora_weights=False)
    return get_peft_model(build(family), lora)


def test_lora_on_a_classifier_is_refused() -> None:
    def rank(comm: Any) -> None:
        with pytest.raises(NotImplementedError, match="another head than a language model's"):
            attach(with_lora("llama_classes", "SEQ_CLS"), sequence_parallel(comm), TABLE)

    run_threads(2, rank)


def test_lora_for_no_task_is_refused_with_the_task_to_give() -> None:
    with pytest.raises(ValueError, match='PeftModel is neither .*task_type="CAUSAL_LM"'):
        find(with_lora("llama", None), TABLE)


def test_an_error_leaves_the_model_as_it_was() -> None:
    """It is attached already, and keeps the attention that it has."""

    def rank(comm: Any) -> None:
        model, sp = build("llama"), sequence_parallel(comm)
        with attach(model, sp, TABLE) as handle:
            with pytest.raises(ValueError, match="takes whole batches already"):
                attach(model, sp, TABLE)
            assert model.config._attn_implementation == handle.name

    run_threads(2, rank)


def test_a_model_with_lora_has_the_loss_and_gradients_of_one_process() -> None:
    models = [with_lora("llama", "CAUSAL_LM") for _ in range(3)]

    def loss_and_gradients(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = model(**batch("llama", "ragged", 0)).loss
        loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return loss.detach(), grads

    def rank(comm: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model = models[comm.rank]
        model.load_state_dict(models[2].state_dict())
        with attach(model, sequence_parallel(comm), TABLE):
            return loss_and_gradients(model)

    (loss_0, grads_0), (loss_1, grads_1) = run_threads(2, rank)
    expected_loss, expected_grads = loss_and_gradients(models[2])
    mean = {name: (grads_0[name] + grads_1[name]) / 2 for name in expected_grads}
    torch.testing.assert_close((loss_0, loss_1), (expected_loss, expected_loss))
    torch.testing.assert_close(mean, expected_grads, rtol=1e-4, atol=1e-6)


def test_evaluation_that_reaches_only_the_models_children_gives_whole_logits() -> None:
    """As GeminiDDP.eval() does: it leaves the model itself in training mode."""
    models = [build("llama") for _ in range(2)]

    def rank(comm: Any) -> torch.Size:
        model = models[comm.rank]
        attach(model, sequence_parallel(comm), TABLE)
        for child in model.children():
            child.eval()
        with torch.no_grad():
            return model(**batch("llama", "ragged", 0)).logits.shape

    assert run_threads(2, rank) == [(1, 23, 256)] * 2


@pytest.mark.parametrize("argument", ["output_hidden_states", "logits_to_keep"])
def test_arguments_whose_result_would_cover_one_rank_alone_are_refused(argument: str) -> None:
    def rank(comm: Any) -> None:
        model = build("llama")
        with (
            attach(model, sequence_parallel(comm), TABLE),
            pytest.raises(NotImplementedError, match=f"{argument}.*leave"),
        ):
            model(batch("llama", "plain", 0)["input_ids"], **{argument: 1})

    run_threads(2, rank)
