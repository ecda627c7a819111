"""Documents of a packed batch reach every layer, or the call is refused."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from operator import methodcaller
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from torch import Tensor  # noqa: E402
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (  # noqa: E402
    apply_activation_checkpointing,
)
from transformers.models.gpt2.modeling_gpt2 import GPT2Block  # noqa: E402

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    OF_5,
    assert_close,
    batch,
    build,
    gradients,
    model_on_one_rank,
    sequence_parallel,
)
from tests.integrations.verify_models import OwnModel  # noqa: E402
from wf_backends import SequenceParallel, SequenceParallelConfig  # noqa: E402
from wf_backends.autochunk.tiling import Tiles, TrainingPlan, apply_training  # noqa: E402
from wf_backends.comm import Communicator  # noqa: E402
from wf_transformers.attention.documents import Documents  # noqa: E402
from wf_transformers.batch import LAYERS_KEEP_KEYWORDS  # noqa: E402
from wf_transformers.memory.tiles import apply_tiles  # noqa: E402

ENABLE = "gradient_checkpointing_enable"
IDS = batch(seqlen=8)["input_ids"]
PACKED = {"input_ids": IDS, "cu_seqlens": (0, 3, 8)}
OUTSIDE = "does not say which documents"


@pytest.mark.skipif(OF_5, reason="the models of this GPT-2 hand keywords on")
def test_models_that_drop_keywords_need_apply() -> None:
    with (
        model_on_one_rank("gpt2") as model,
        pytest.raises(ValueError, match="GPT2LMHeadModel .* call wf_transformers.apply"),
    ):
        wf_transformers.forward_kwargs(model, PACKED)


def test_documents_that_a_model_of_ones_own_does_not_take_are_refused() -> None:
    with pytest.raises(ValueError, match="forward of OwnModel takes no cu_seqlens"):
        wf_transformers.forward_kwargs(OwnModel(counts_positions=False), PACKED)


def wrap_layers(model: Any) -> None:
    """As engines checkpoint layers under FSDP."""
    apply_activation_checkpointing(model, check_fn=lambda module: type(module) is GPT2Block)


@pytest.mark.parametrize(
    "enable",
    [
        pytest.param(methodcaller(ENABLE), id="trainer"),
        pytest.param(methodcaller(ENABLE, {"use_reentrant": True}), id="reentrant"),
        pytest.param(wrap_layers, id="wrapper"),
    ],
)
def test_checkpointing_as_engines_enable_it_recomputes_with_the_documents(enable: Any) -> None:
    """After the model is attached, and with transformers' default, the reentrant variant."""
    with model_on_one_rank("gpt2", apply=True) as model:
        expected = packed_gradients(model)
        enable(model)
        for name, grad in packed_gradients(model).items():
            assert_close(grad, expected[name.replace("_checkpoint_wrapped_module.", "")], name)


def test_a_copied_model_recomputes_with_its_documents() -> None:
    with model_on_one_rank("gpt2", apply=True) as model:
        model.gradient_checkpointing_enable()
        expected = packed_gradients(model)
        for name, grad in packed_gradients(copy.deepcopy(model)).items():
            assert_close(grad, expected[name], name)


@pytest.mark.skipif(LAYERS_KEEP_KEYWORDS, reason="the layers of this GPT-2 hand keywords on")
def test_recomputing_in_a_context_of_the_users_own_needs_checkpoint_kwargs() -> None:
    with model_on_one_rank("gpt2", apply=True) as model:
        own = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), nullcontext())}
        model.gradient_checkpointing_enable(own)
        with pytest.raises(ValueError, match="checkpoint_kwargs"):
            packed_gradients(model)


def packed_gradients(model: Any) -> dict[str, Tensor]:
    model.zero_grad()
    model(**wf_transformers.forward_kwargs(model, PACKED)).logits.logsumexp(-1).sum().backward()
    return gradients(model)


@pytest.mark.parametrize("tiled_first", [False, True])
def test_layers_in_tiles_of_samples_know_their_documents_in_the_backward(
    tiled_first: bool,
) -> None:
    packed = batch(2, 8, cu_seqlens=(0, 3, 8))
    plan = TrainingPlan((Tiles("transformer.h.0", 0, 2),), 0, 0, 0.0)

    def rank(comm: Communicator) -> list[dict[str, Tensor]]:
        results = []
        for tiled in (False, True):
            model, sp = build("gpt2", "sdpa", {}), sequence_parallel(comm)
            if tiled and tiled_first:
                apply_training(model, plan)
            with wf_transformers.attach(model, sp) as handle:
                if tiled and not tiled_first:
                    apply_tiles(model, handle, plan)
                local = handle.shard_batch(packed)
                logits = model(**wf_transformers.forward_kwargs(model, local)).logits
                handle.loss(logits, local["labels"]).backward()
            results.append(gradients(model))
        return results

    for expected, grads in run_threads(2, rank):
        assert grads.keys() == expected.keys()
        for name, grad in grads.items():
            assert_close(grad, expected[name], name)


def test_documents_reach_the_layers_of_a_model_inside_peft() -> None:
    """PEFT calls the forward of that model, past its hooks. New adapters of LoRA change nothing."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True)
    logits = []
    for wrap in (lambda model: model, lambda model: peft.get_peft_model(model, config)):
        model = wrap(build("gpt2", "sdpa", {}))
        sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=1))
        with wf_transformers.attach(model, sp):
            logits.append(model(**wf_transformers.forward_kwargs(model, PACKED)).logits)
    assert_close(logits[1], logits[0], "logits")


def test_a_failed_forward_leaves_no_documents_behind() -> None:
    with model_on_one_rank("gpt2", apply=True) as model:
        with pytest.raises(IndexError):
            model(torch.full((1, 8), 1000), cu_seqlens=(0, 3, 8))  # no such token
        with pytest.raises(ValueError, match=OUTSIDE):
            model.transformer(IDS, use_cache=False)


def test_a_layer_called_without_its_model_must_be_given_the_documents_of_the_batch() -> None:
    """As a stage of a pipeline calls it. It would attend across documents."""
    model = build("gpt2", "sdpa", {})
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=1))
    with wf_transformers.attach(model, sp) as handle:
        layer, states = model.transformer.h[0], model.transformer.wte(IDS)
        layer(states)
        handle.shard_batch(PACKED)
        with pytest.raises(ValueError, match=OUTSIDE):
            layer(states)


def test_a_plain_batch_may_follow_a_packed_one_where_keywords_alone_tell_documents() -> None:
    """A registered attention knows no scopes."""
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=1))
    with wf_transformers.register(sp) as handle:
        model = build("llama", handle.name, {})
        for packed in (PACKED, {"input_ids": IDS}):
            local = handle.shard_batch(packed)
            model(**wf_transformers.forward_kwargs(model, local))


ONE, TWO = {"cu_seqlens": (0, 4)}, {"cu_seqlens": (0, 2, 4)}


def test_attention_before_any_documents_has_none() -> None:
    assert Documents().current({}) == {}


def test_attention_has_the_documents_of_its_scope() -> None:
    documents = Documents()
    with documents.scope(ONE):
        assert documents.current({}) == ONE


def test_keywords_override_the_scope() -> None:
    documents = Documents()
    with documents.scope(ONE):
        assert documents.current(TWO) == TWO


def test_attention_outside_a_scope_is_refused_once_there_were_documents() -> None:
    """Unless its keywords say that it has none."""
    documents = Documents()
    with documents.scope(ONE):
        pass
    with pytest.raises(ValueError, match=OUTSIDE):
        documents.current({})
    assert documents.current({"cu_seqlens": None}) == {}


def test_recomputation_has_the_documents_of_its_forward() -> None:
    documents = Documents()
    with documents.scope(ONE):
        _, recomputation = documents.checkpoint_contexts()
    with documents.scope({}), recomputation:
        assert documents.current({}) == ONE
