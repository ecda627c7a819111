"""A model that exists already, switched by one call and back by another; what cannot be spread."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers as tf  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402
from transformers.models.xglm import modeling_xglm  # noqa: E402

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    BUILDING,
    DECODERS,
    LLAMA,
    Job,
    assert_close,
    batch,
    build,
    call,
    gradients,
    one_device,
    sequence_parallel,
)
from wf_backends import SequenceParallel, SequenceParallelConfig  # noqa: E402
from wf_backends.comm import World  # noqa: E402
from wf_transformers.models import uses_registry  # noqa: E402

IDS = batch(seqlen=24)["input_ids"]
DOCUMENTS = (0, 5, 16, 23)


class Pair(nn.Module):
    """Two Hugging Face models in a module of one's own."""

    def __init__(self, student: Any, teacher: Any) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher

    def forward(self, **words: Any) -> list[torch.Tensor]:
        return [model(**words).logits for model in (self.student, self.teacher)]


@pytest.mark.parametrize("family", DECODERS)
def test_a_model_built_otherwise_is_switched_and_switched_back(family: str) -> None:
    model = build(family, "sdpa", {}).eval()
    sp = SequenceParallel(SequenceParallelConfig(), World(1).comm(0))
    given = {"input_ids": batch()["input_ids"]}
    before = model(**given).logits
    handle = wf_transformers.attach(model, sp)
    assert model.config._attn_implementation.startswith("wallfacer")
    ours = model(**wf_transformers.forward_kwargs(model, sp.shard_batch(given))).logits
    torch.testing.assert_close(ours[:, : before.shape[1]], before, rtol=1e-9, atol=1e-11)
    handle.remove()
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(**given).logits, before)


def pair() -> Pair:
    """Two models of one config, which the second connection must not take from the first."""
    student = build("llama", "sdpa", {})
    with BUILDING:
        torch.manual_seed(2)
        return Pair(student, tf.LlamaForCausalLM(student.config).double())


def test_every_model_of_a_module_is_connected() -> None:
    """With documents, and checkpointing: the wrapper is asked whether these get through."""
    given = batch()
    wanted = pair()(input_ids=given["input_ids"])

    def rank(comm: Any) -> list[torch.Tensor]:
        sp, both = sequence_parallel(comm), pair()
        both.student.gradient_checkpointing_enable({"use_reentrant": False})
        with wf_transformers.attach(both, sp):
            words = wf_transformers.forward_kwargs(both, sp.shard_batch(given))
            found = [sp.unshard(logits.detach())[:, :23] for logits in both(**words)]
        assert both.student.config._attn_implementation == "sdpa"
        return found

    for found in run_threads(2, rank):
        for ours, theirs, name in zip(found, wanted, ("student", "teacher"), strict=True):
            assert_close(ours, theirs, name)


def test_a_model_that_is_connected_twice_goes_on() -> None:
    for family in ("llama", "bert"):
        _, logits, _, _ = one_device(Job(family), batch(seqlen=24))

        def rank(comm: Any, family: str = family) -> torch.Tensor:
            sp, model = sequence_parallel(comm), build(family, "eager", {})
            wf_transformers.connect(model, sp)
            wf_transformers.connect(model, sp)
            words = wf_transformers.forward_kwargs(model, sp.shard_batch({"input_ids": IDS}))
            return sp.unshard(model(**words).logits.detach())

        assert_close(run_threads(2, rank)[0], logits, family)


def test_a_model_that_never_asks_for_attention_is_refused_after_its_forward() -> None:
    def rank(sp: SequenceParallel, name: str) -> None:
        model = build("llama", name, {"num_hidden_layers": 0})
        wf_transformers.apply(model, sp)
        words = wf_transformers.forward_kwargs(model, sp.shard_batch({"input_ids": IDS}))
        with pytest.raises(NotImplementedError, match="no layer of LlamaForCausalLM .* registry"):
            model(**words)

    call(2, rank)


@pytest.mark.skipif(hasattr(modeling_xglm, "ALL_ATTENTION_FUNCTIONS"), reason="this XGLM does ask")
def test_a_model_that_cannot_ask_is_refused_at_once() -> None:
    model = tf.XGLMForCausalLM(tf.XGLMConfig(d_model=8, ffn_dim=8, attention_heads=2, num_layers=1))
    assert not uses_registry(model)

    def rank(comm: Any) -> None:
        with pytest.raises(NotImplementedError, match="no layer of XGLMForCausalLM"):
            wf_transformers.attach(nn.ModuleList([model]), sequence_parallel(comm))

    run_threads(2, rank)
    assert model.config._attn_implementation != "wallfacer"


def test_learned_biases_are_refused_by_name() -> None:
    words = {"d_model": 8, "d_ff": 8, "d_kv": 4, "num_heads": 2, "num_layers": 1}
    config = tf.SwitchTransformersConfig(**words, vocab_size=61, num_experts=2)
    models = [tf.SwitchTransformersForConditionalGeneration(config) for _ in range(2)]

    def rank(comm: Any) -> None:
        model = models[comm.rank]
        with pytest.raises(NotImplementedError, match="a learned bias by relative|attention bias"):
            with BUILDING:
                wf_transformers.attach(model, sequence_parallel(comm), verify=False)
            model(input_ids=IDS, decoder_input_ids=IDS)

    run_threads(2, rank)


@pytest.mark.parametrize("family", DECODERS)
def test_models_that_ask_are_known_to(family: str) -> None:
    assert uses_registry(build(family, "sdpa", {}))


@pytest.mark.parametrize(
    ("family", "make", "head"),
    [
        ("llama", tf.LlamaForCausalLM, "causal"),
        ("gpt2", tf.GPT2LMHeadModel, "causal"),
        ("bert", tf.BertForMaskedLM, "masked"),
        ("llama", tf.LlamaForTokenClassification, "other"),
        ("llama", tf.LlamaForSequenceClassification, "other"),
        ("llama", tf.LlamaModel, "other"),
        ("llama", type("Own", (tf.LlamaForCausalLM,), {}), "causal"),
    ],
)
def test_what_labels_are_follows_from_the_class(family: str, make: Any, head: str) -> None:
    model = make(build(family, "sdpa", {}).config)
    assert wf_transformers.head_of(nn.ModuleList([model])) == head


NO_LABELS = "was called with labels: .* sp.loss"
LOCAL = {"input_ids": IDS, "position_ids": torch.arange(24)[None], "use_cache": False}


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        ({"labels": IDS}, ValueError, NO_LABELS),
        ({"position_ids": None}, ValueError, "without position_ids.*forward_kwargs"),
        ({"attention_mask": torch.ones_like(IDS)}, ValueError, "generate on one process"),
        ({"logits_to_keep": 1}, NotImplementedError, "logits_to_keep.*on one process"),
        ({"logits_to_keep": IDS[0]}, NotImplementedError, "logits_to_keep"),
        ({"past_key_values": tf.DynamicCache()}, NotImplementedError, "past_key_values"),
        ({"cache": tf.DynamicCache()}, NotImplementedError, "cache: a KV cache"),
        ({"output_router_logits": True}, NotImplementedError, "output_router_logits"),
    ],
)
def test_calls_that_take_a_part_for_the_whole(
    words: dict[str, Any], kind: type[Exception], message: str
) -> None:
    def rank(sp: SequenceParallel, name: str) -> None:
        model = build("llama", name, {})
        wf_transformers.apply(model, sp)
        with pytest.raises(kind, match=message):
            model(**LOCAL | words)

    call(2, rank)


def test_qwens_windows_are_told_of_at_attachment() -> None:
    """Layers have them here; the eager attention of transformers 4 gives them to all."""
    more = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
    model = build("qwen2", "sdpa", more)
    sp = SequenceParallel(SequenceParallelConfig())
    if getattr(model.config, "layer_types", None):
        wf_transformers.attach(model, sp).remove()
        return
    with pytest.warns(UserWarning, match="from max_window_layers=1 on have a sliding window"):
        wf_transformers.attach(model, sp).remove()


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_the_model_inside_is_not_called_without_positions(family: str) -> None:
    """For hidden states, of which a chunked loss is made."""

    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), build(family, "eager", {})
        wf_transformers.attach(model, sp)
        local = sp.shard_batch({"input_ids": IDS})["input_ids"]
        with pytest.raises(ValueError, match="without position_ids.*forward_kwargs"):
            model.base_model(input_ids=local)

    run_threads(2, rank)


def test_the_model_inside_one_that_takes_whole_batches_is_not_called() -> None:
    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), build("llama", "eager", {})
        wf_transformers.WholeBatchHooks(model, wf_transformers.attach(model, sp))
        with pytest.raises(NotImplementedError, match="LlamaModel was called, and not the model"):
            model.model(input_ids=IDS, position_ids=torch.arange(24)[None])
        model(input_ids=IDS)

    run_threads(2, rank)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_generate_is_refused(family: str, use_cache: bool) -> None:
    def rank(sp: SequenceParallel, name: str) -> None:
        model = build(family, name, {}).eval()
        wf_transformers.apply(model, sp)
        with pytest.raises((ValueError, NotImplementedError), match="generate on one process"):
            model.generate(IDS, use_cache=use_cache, max_new_tokens=1, pad_token_id=0)

    call(2, rank)


VARYING = {"rope_type": "dynamic", "factor": 4.0}


@pytest.mark.parametrize("apply", [False, True])
def test_rotary_frequencies_that_vary_with_the_length(apply: bool) -> None:
    def rank(sp: SequenceParallel, name: str) -> None:
        model = build("llama", name, {"rope_scaling": VARYING})
        with pytest.raises(NotImplementedError, match='LlamaForCausalLM has rope_type "dynamic"'):
            if apply:
                wf_transformers.apply(model, sp)
            wf_transformers.forward_kwargs(model, sp.shard_batch({"input_ids": IDS}))

    call(2, rank)
    more = {"rope_scaling": VARYING}
    call(1, lambda sp, name: wf_transformers.apply(build("llama", name, more), sp))


@pytest.mark.parametrize(
    "words",
    [{"rope_scaling": {"type": "longrope"}}, {"rope_parameters": {"full_attention": VARYING}}],
)
def test_a_layer_whose_rotary_frequencies_vary(words: dict[str, Any]) -> None:
    layer = SimpleNamespace(is_causal=True, config=SimpleNamespace(**words))

    def rank(_: SequenceParallel, name: str) -> None:
        q = torch.randn(1, 2, 4, 16)
        with pytest.raises(NotImplementedError, match="frequencies follow from the longest"):
            ALL_ATTENTION_FUNCTIONS[name](layer, q, q, q, None)

    call(2, rank)


@pytest.mark.parametrize("apply", [False, True])
def test_convolutions_over_tokens(apply: bool) -> None:
    def rank(sp: SequenceParallel, name: str) -> None:
        model = build("llama", name, {})
        model.model.one = nn.Conv1d(4, 4, 1)
        wf_transformers.forward_kwargs(model, sp.shard_batch({"input_ids": IDS}))
        model.model.mix = nn.Conv1d(4, 4, 3)
        with pytest.raises(NotImplementedError, match="model.mix is a convolution over tokens"):
            if apply:
                wf_transformers.apply(model, sp)
            wf_transformers.forward_kwargs(model, sp.shard_batch({"input_ids": IDS}))

    call(2, rank)


class Takes(nn.LSTM):
    """Cuts for itself."""

    def set_sequence_parallel(self, sp: SequenceParallel) -> None:
        pass


class SomeIndexer(nn.Linear):
    """Named as those of DeepSeek V3.2 and others."""


class SomeCompressor(nn.Linear):
    """Named as DeepSeek V4's."""


@pytest.mark.parametrize(
    ("mixer", "message"),
    [
        (SomeIndexer(4, 4), "Sequential.1 is an indexer, which chooses the keys of each query"),
        (SomeCompressor(4, 4), "Sequential.1 is a compressor, which makes one key of several"),
        (nn.Conv1d(4, 4, 3), "Sequential.1 is a convolution over tokens, kernel_size 3"),
        (nn.Sequential(nn.LSTM(4, 4)), "Sequential.1.0 is a recurrence over tokens, LSTM"),
        (nn.MultiheadAttention(4, 2), "Sequential.1 is torch's own attention"),
        (nn.BatchNorm1d(4), "Sequential.1 is a mean over all tokens of a batch, BatchNorm1d"),
        (nn.Conv1d(4, 4, 1), None),
        (Takes(4, 4), None),
    ],
)
def test_layers_around_a_model_that_mix_tokens(mixer: nn.Module, message: str | None) -> None:
    def rank(comm: Any) -> None:
        model = nn.Sequential(build("llama", "eager", {}), mixer)
        if message is None:
            wf_transformers.attach(model, sequence_parallel(comm))
            return
        with pytest.raises(NotImplementedError, match=message):
            wf_transformers.attach(model, sequence_parallel(comm))

    run_threads(2, rank)


@pytest.mark.skipif(not hasattr(tf, "DeepseekV32Config"), reason="this transformers has none")
def test_sparse_attention_that_shows_in_long_sequences_only() -> None:
    """Here every key is chosen, so that a comparison would find nothing."""
    words = {"first_k_dense_replace": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": 16}
    words |= {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    words |= {"index_n_heads": 2, "index_head_dim": 16, "num_key_value_heads": 4}
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = tf.DeepseekV32Config(vocab_size=32, num_attention_heads=4, **shape, **words)
    model = tf.DeepseekV32ForCausalLM(config)

    def rank(comm: Any) -> None:
        with pytest.raises(NotImplementedError, match=r"self_attn\.indexer is an indexer"):
            wf_transformers.attach(model, sequence_parallel(comm))

    run_threads(2, rank)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig", "LoraConfig"])
def test_virtual_tokens_are_refused(kind: str) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed", exc_type=ImportError)
    more = {} if kind == "LoraConfig" else {"num_virtual_tokens": 4}
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **more)
    model = peft.get_peft_model(build("llama", "eager", {}), config)
    sp = SequenceParallel(SequenceParallelConfig())
    if kind == "LoraConfig":
        wf_transformers.attach(model, sp).remove()
        return
    with pytest.raises(NotImplementedError, match=r"PEFT's P\w+_TUNING: its virtual tokens"):
        wf_transformers.attach(model, sp)


@pytest.mark.skipif(not hasattr(tf, "Cohere2Config"), reason="this transformers has no Cohere2")
def test_a_model_that_writes_into_the_mask() -> None:
    """Cohere2 writes the least number of its dtype, here float64."""
    words = {"sliding_window": 8, "sliding_window_pattern": 2, "attention_dropout": 0.0}
    given = batch(seqlen=24)

    def built(_: Any = None) -> Any:
        with BUILDING:
            torch.manual_seed(1)
            config = tf.Cohere2Config(**{**LLAMA, **words}, pad_token_id=0)
            config._attn_implementation = "eager"
            return tf.Cohere2ForCausalLM(config).double()

    wanted = built()(**given).loss

    def rank(comm: Any) -> torch.Tensor:
        model = built()
        with BUILDING:
            handle = wf_transformers.attach_model(model, sequence_parallel(comm))
        wf_transformers.WholeBatchHooks(model, handle)
        return model(**given).loss.detach()

    for loss in run_threads(2, rank):
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_layers_are_recomputed_without_documents_after_some_with_them(family: str) -> None:
    _, _, _, wanted = one_device(Job(family), batch(seqlen=24))

    def rank(sp: SequenceParallel, name: str) -> dict[str, torch.Tensor]:
        model = build(family, name, {})
        application = wf_transformers.apply(model, sp)
        own = {"use_reentrant": False} if family == "llama" else application.checkpoint_kwargs
        model.gradient_checkpointing_enable(own)
        for given in (batch(cu_seqlens=DOCUMENTS), batch(seqlen=24)):
            model.zero_grad()
            local = sp.shard_batch(given)
            logits = model(**wf_transformers.forward_kwargs(model, local)).logits
            sp.loss(logits, local["labels"]).backward()
        return gradients(model)

    found = call(2, rank)
    for name, grad in wanted.items():
        assert_close(sum(grads[name] for grads in found), grad, name)


def test_under_autocast_attention_is_narrow_as_torchs_own() -> None:
    def logits(model: Any, **words: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model.float()(**words).logits.detach().float()

    wanted = logits(build("llama", "sdpa", {}), input_ids=IDS)

    def rank(sp: SequenceParallel, name: str) -> torch.Tensor:
        model, local = build("llama", name, {}), sp.shard_batch({"input_ids": IDS})
        return sp.unshard(logits(model, **wf_transformers.forward_kwargs(model, local)))

    error = (call(2, rank)[0] - wanted).abs().max() / wanted.abs().max()
    assert error < 2e-2
