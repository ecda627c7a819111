"""Models that cannot be exact on ranks are refused, with the module or option that mixes tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers as tf  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402
from transformers.models.xglm import modeling_xglm  # noqa: E402

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    BERT_HAS_OWN_REGISTRY,
    batch,
    build,
    registered,
    run_registered,
    sequence_parallel,
)
from wf_backends import SequenceParallel, SequenceParallelConfig  # noqa: E402
from wf_transformers.models import uses_registry  # noqa: E402

IDS = batch(seqlen=24)["input_ids"]


def forward_kwargs(model: Any, sp: SequenceParallel) -> dict[str, Any]:
    return wf_transformers.forward_kwargs(model, sp.shard_batch({"input_ids": IDS}))


# The registry of attention functions


def test_a_model_that_never_calls_our_attention_is_refused_after_its_forward() -> None:
    def rank(sp: SequenceParallel, name: str) -> None:
        model = build("llama", name, {"num_hidden_layers": 0})
        wf_transformers.apply(model, sp)
        with pytest.raises(NotImplementedError, match="no layer of LlamaForCausalLM .* registry"):
            model(**forward_kwargs(model, sp))

    run_registered(2, rank)


def test_a_config_in_place_of_the_sequence_parallel_is_refused() -> None:
    with pytest.raises(ValueError, match="sp must be a SequenceParallel, .*, got a dict"):
        wf_transformers.attach(torch.nn.Linear(2, 2), {"sequence_parallel_size": 2})  # type: ignore


def test_attention_that_is_set_after_attach_is_refused_by_name() -> None:
    def rank(comm: Any) -> None:
        model, sp = build("llama", "sdpa", {}), sequence_parallel(comm)
        wf_transformers.attach(model, sp, verify=False)
        model.config._attn_implementation = "sdpa"
        with pytest.raises(
            NotImplementedError, match="set to 'sdpa' after attach, and ours is 'wallf"
        ):
            model(**forward_kwargs(model, sp))

    run_threads(2, rank)


@pytest.mark.skipif(hasattr(modeling_xglm, "ALL_ATTENTION_FUNCTIONS"), reason="XGLM uses it here")
def test_a_model_that_does_not_use_the_registry_is_refused_by_attach() -> None:
    model = tf.XGLMForCausalLM(tf.XGLMConfig(d_model=8, ffn_dim=8, attention_heads=2, num_layers=1))
    assert not uses_registry(model)

    def rank(comm: Any) -> None:
        with pytest.raises(NotImplementedError, match="no layer of XGLMForCausalLM"):
            wf_transformers.attach(nn.ModuleList([model]), sequence_parallel(comm))

    run_threads(2, rank)
    assert model.config._attn_implementation != "wallfacer"


def test_a_model_whose_file_has_a_registry_of_its_own_is_refused_by_attach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Doge's, in which our name is a KeyError."""
    monkeypatch.setattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS", {})
    model = build("llama", "sdpa", {})

    def rank(comm: Any) -> None:
        with pytest.raises(NotImplementedError, match="no layer of LlamaForCausalLM"):
            wf_transformers.attach(model, sequence_parallel(comm))

    run_threads(2, rank)


def test_apply_refuses_a_model_built_with_another_attention() -> None:
    with (
        registered() as (sp, _),
        pytest.raises(ValueError, match="attn_implementation='sdpa'; call wf_transf"),
    ):
        wf_transformers.apply(build("llama", "sdpa", {}), sp)


def test_apply_refuses_a_model_registered_for_another_sp() -> None:
    with registered() as (sp, name), pytest.raises(ValueError, match="registered for another sp"):
        wf_transformers.apply(build("llama", name, {}), sequence_parallel(sp.comm))


@pytest.mark.skipif(not BERT_HAS_OWN_REGISTRY, reason="this BERT uses the registry of all models")
@pytest.mark.parametrize(
    ("config_changes", "message"),
    [
        ({"is_decoder": True}, "is_decoder=True"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
    ],
)
def test_bert_that_decodes_or_has_a_bias_is_refused(
    config_changes: dict[str, Any], message: str
) -> None:
    """By `apply`, and when it is built with the registered name."""
    with registered() as (sp, name):
        with pytest.raises(NotImplementedError, match=message):
            wf_transformers.apply(build("bert", "eager", config_changes), sp)
        with pytest.raises(NotImplementedError, match=message):
            build("bert", name, config_changes)


# Options of a config


def test_a_learned_bias_is_refused() -> None:
    """By `attach`, or by the first forward."""
    sizes = {"d_model": 8, "d_ff": 8, "d_kv": 4, "num_heads": 2, "num_layers": 1, "num_experts": 2}
    config = tf.SwitchTransformersConfig(**sizes, vocab_size=61)
    models = [tf.SwitchTransformersForConditionalGeneration(config) for _ in range(2)]

    def rank(comm: Any) -> None:
        model = models[comm.rank]
        with pytest.raises(NotImplementedError, match="a learned bias by relative|attention bias"):
            wf_transformers.attach(model, sequence_parallel(comm), verify=False)
            model(input_ids=IDS, decoder_input_ids=IDS)

    run_threads(2, rank)


def test_attach_warns_that_only_some_layers_of_qwen2_have_a_window() -> None:
    """In transformers 4, whose own attention gives all layers the window."""
    windows = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
    model = build("qwen2", "sdpa", windows)
    layers_have_types = getattr(model.config, "layer_types", None)
    warning = pytest.warns(UserWarning, match="from max_window_layers=1 on have a sliding window")
    with nullcontext() if layers_have_types else warning:
        wf_transformers.attach(model, SequenceParallel(SequenceParallelConfig())).remove()


@pytest.mark.parametrize("passed_on", [False, True])
def test_attach_warns_of_layers_that_share_keys_by_a_cache_alone(passed_on: bool) -> None:
    """As Gemma 3n of transformers 4.53 to 5.3."""
    model = build("llama", "sdpa", {})
    layer = model.model.layers[-1].self_attn
    layer.is_kv_shared_layer = True
    if passed_on:
        layer.forward = lambda *_, shared_kv_states=None, **__: None
    warning = pytest.warns(UserWarning, match="its last layers make keys and values of their own")
    with nullcontext() if passed_on else warning:
        wf_transformers.attach(model, SequenceParallel(SequenceParallelConfig())).remove()


DYNAMIC_ROPE = {"rope_type": "dynamic", "factor": 4.0}
"""Frequencies that follow from the length of the sequence."""


def test_rotary_frequencies_that_depend_on_the_length_are_refused_without_apply() -> None:
    def rank(sp: SequenceParallel, name: str) -> None:
        model = build("llama", name, {"rope_scaling": DYNAMIC_ROPE})
        with wf_transformers.apply(model, sp):
            forward_kwargs(model, sp)
        with pytest.raises(NotImplementedError, match='LlamaForCausalLM has rope_type "dynamic"'):
            forward_kwargs(model, sp)

    run_registered(2, rank)


def test_one_rank_may_have_rotary_frequencies_that_depend_on_the_length() -> None:
    with registered() as (sp, name):
        wf_transformers.apply(build("llama", name, {"rope_scaling": DYNAMIC_ROPE}), sp)


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": {"type": "longrope"}},
        {"rope_parameters": {"full_attention": DYNAMIC_ROPE}},
    ],
)
def test_a_layer_whose_rotary_frequencies_depend_on_the_length_is_refused(
    config: dict[str, Any],
) -> None:
    """By the attention function, whose models nobody applied."""
    layer = SimpleNamespace(is_causal=True, config=SimpleNamespace(**config))

    def rank(_: SequenceParallel, name: str) -> None:
        q = torch.randn(1, 2, 4, 16)
        with pytest.raises(NotImplementedError, match="frequencies follow from the longest"):
            ALL_ATTENTION_FUNCTIONS[name](layer, q, q, q, None)

    run_registered(2, rank)


def on_attached_llamas(fn: Callable[[Any, SequenceParallel], None], **config_changes: Any) -> None:
    """fn(model, sp) on each of two ranks."""

    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), build("llama", "sdpa", config_changes)
        with wf_transformers.attach(model, sp, verify=False):
            fn(model, sp)

    run_threads(2, rank)


def test_layerdrop_is_refused_in_training_only() -> None:
    """Each rank would leave out other layers."""

    def check(model: Any, sp: SequenceParallel) -> None:
        with pytest.raises(NotImplementedError, match="trained with layerdrop=0.1"):
            model(**forward_kwargs(model, sp))
        model.eval()(**forward_kwargs(model, sp))

    on_attached_llamas(check, layerdrop=0.1)


def test_a_layer_that_one_rank_leaves_out_is_named() -> None:
    def check(model: Any, sp: SequenceParallel) -> None:
        if sp.rank == 1:
            model.model.layers = model.model.layers[1:]
        names = (
            r"layer 'model.layers.0.self_attn' \(ranks \[0\]\), layer 'model.layers.1.self_attn'"
        )
        with pytest.raises(ValueError, match=names):
            model(**forward_kwargs(model, sp))

    on_attached_llamas(check)


def attach_peft(config_class: str, **options: Any) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed", exc_type=ImportError)
    config = getattr(peft, config_class)(task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(build("llama", "eager", {}), config)
    wf_transformers.attach(model, SequenceParallel(SequenceParallelConfig())).remove()


@pytest.mark.parametrize("config_class", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_virtual_tokens_are_refused(config_class: str) -> None:
    with pytest.raises(NotImplementedError, match=r"PEFT's P\w+_TUNING: its virtual tokens"):
        attach_peft(config_class, num_virtual_tokens=4)


def test_adalora_whose_penalty_would_be_lost_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="PEFT's ADALORA: its penalty"):
        attach_peft("AdaLoraConfig", total_step=10)


def test_activated_lora_is_refused() -> None:
    config_class = pytest.importorskip("peft", exc_type=ImportError).LoraConfig
    if "alora_invocation_tokens" not in signature(config_class).parameters:
        pytest.skip("this PEFT has no activated LoRA")
    with pytest.raises(NotImplementedError, match="PEFT's alora_invocation_tokens"):
        attach_peft("LoraConfig", alora_invocation_tokens=[5, 6])


def test_lora_is_accepted() -> None:
    attach_peft("LoraConfig")
