"""`attach` switches an existing model to our attention, exactly, and `remove` switches it back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers as tf  # noqa: E402

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.results import (  # noqa: E402
    Result,
    assert_shares_sum_to,
    run_document_by_document,
    run_on_shard,
)
from tests.integrations.transformers_models import (  # noqa: E402
    BUILD_LOCK,
    DECODERS,
    LLAMA,
    SEQLEN,
    assert_close,
    batch,
    build,
    run_registered,
    sequence_parallel,
)
from wf_backends import SequenceParallel, SequenceParallelConfig  # noqa: E402
from wf_transformers.models import head_of, uses_registry  # noqa: E402

INPUTS = {"input_ids": batch(seqlen=24)["input_ids"]}


def logits_on_ranks(model: Any, sp: SequenceParallel, inputs: dict[str, Any]) -> Tensor:
    logits = model(**wf_transformers.forward_kwargs(model, sp.shard_batch(inputs))).logits
    return sp.unshard(logits.detach())


@pytest.mark.parametrize("family", DECODERS)
def test_attach_is_exact_and_remove_restores_the_model(family: str) -> None:
    model, inputs = build(family, "sdpa", {}).eval(), {"input_ids": batch()["input_ids"]}
    sp = SequenceParallel(SequenceParallelConfig())
    expected = model(**inputs).logits
    handle = wf_transformers.attach(model, sp)
    assert model.config._attn_implementation.startswith("wallfacer")
    actual = logits_on_ranks(model, sp, inputs)
    torch.testing.assert_close(actual[:, :SEQLEN], expected, rtol=1e-9, atol=1e-11)
    handle.remove()
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(**inputs).logits, expected)


class StudentAndTeacher(nn.Module):
    """Two Hugging Face models of one config in a user's module."""

    def __init__(self) -> None:
        super().__init__()
        self.student = build("llama", "sdpa", {})
        with BUILD_LOCK:
            torch.manual_seed(2)
            self.teacher = tf.LlamaForCausalLM(self.student.config).double()

    def forward(self, **inputs: Any) -> list[Tensor]:
        return [model(**inputs).logits for model in (self.student, self.teacher)]


def test_every_model_inside_a_module_is_attached() -> None:
    """Padding is a document, which both get, and the one whose layers are recomputed gets twice."""
    inputs = batch()
    expected = StudentAndTeacher()(input_ids=inputs["input_ids"])

    def rank(comm: Any) -> list[Tensor]:
        sp, models = sequence_parallel(comm), StudentAndTeacher()
        models.student.gradient_checkpointing_enable({"use_reentrant": False})
        with wf_transformers.attach(models, sp):
            local = wf_transformers.forward_kwargs(models, sp.shard_batch(inputs))
            both_logits = [sp.unshard(logits.detach())[:, :SEQLEN] for logits in models(**local)]
        assert models.student.config._attn_implementation == "sdpa"
        return both_logits

    for student_logits, teacher_logits in run_threads(2, rank):
        assert_close(student_logits, expected[0], "student")
        assert_close(teacher_logits, expected[1], "teacher")


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_model_attached_twice_is_exact(family: str) -> None:
    expected = build(family, "sdpa", {})(**INPUTS).logits

    def rank(comm: Any) -> Tensor:
        sp, model = sequence_parallel(comm), build(family, "eager", {})
        wf_transformers.attach(model, sp)
        wf_transformers.connect(model, sp)  # an earlier name of attach
        return logits_on_ranks(model, sp, INPUTS)

    assert_close(run_threads(2, rank)[0], expected, "logits")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_recomputed_layers_forget_the_documents_of_an_earlier_batch(family: str) -> None:
    """A batch without documents after one that has some."""
    plain, packed = batch(seqlen=24), batch(cu_seqlens=(0, 5, 16, SEQLEN))
    expected = run_document_by_document(build(family, "sdpa", {}), plain)

    def rank(sp: SequenceParallel, name: str) -> Result:
        model = build(family, name, {})
        wf_transformers.apply(model, sp)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        run_on_shard(model, sp, sp.shard_batch(packed))
        model.zero_grad()
        return run_on_shard(model, sp, sp.shard_batch(plain))

    assert_shares_sum_to(expected, run_registered(2, rank))


def test_attention_under_autocast_is_as_close_as_bfloat16() -> None:
    def logits(model: Any, **inputs: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model.float()(**inputs).logits.detach().float()

    expected = logits(build("llama", "sdpa", {}), **INPUTS)

    def rank(sp: SequenceParallel, name: str) -> Tensor:
        model, local = build("llama", name, {}), sp.shard_batch(INPUTS)
        return sp.unshard(logits(model, **wf_transformers.forward_kwargs(model, local)))

    error = (run_registered(2, rank)[0] - expected).abs().max() / expected.abs().max()
    assert error < 2e-2  # bfloat16 rounds by 2**-9, and there are two layers


@pytest.mark.skipif(not hasattr(tf, "Cohere2Config"), reason="this transformers has no Cohere2")
def test_a_model_that_writes_into_its_mask_is_exact() -> None:
    """Cohere2 writes the least number of its dtype into the mask; 1e-6: its loss is in float32."""
    inputs = batch(seqlen=24)
    windows = {"sliding_window": 8, "sliding_window_pattern": 2, "pad_token_id": 0}

    def build_cohere2() -> Any:
        with BUILD_LOCK:
            torch.manual_seed(1)
            config = tf.Cohere2Config(**{**LLAMA, **windows})
            config._attn_implementation = "eager"
            return tf.Cohere2ForCausalLM(config).double()

    expected = build_cohere2()(**inputs).loss

    def rank(comm: Any) -> Tensor:
        model = build_cohere2()
        handle = wf_transformers.attach_model(model, sequence_parallel(comm))
        wf_transformers.WholeBatchHooks(model, handle)
        return model(**inputs).loss.detach()

    for loss in run_threads(2, rank):
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("family", DECODERS)
def test_decoders_use_the_registry_of_attention(family: str) -> None:
    assert uses_registry(build(family, "sdpa", {}))


@pytest.mark.parametrize(
    ("family", "model_class", "head"),
    [
        ("llama", tf.LlamaForCausalLM, "causal"),
        ("gpt2", tf.GPT2LMHeadModel, "causal"),
        ("bert", tf.BertForMaskedLM, "masked"),
        ("llama", tf.LlamaForTokenClassification, "other"),
        ("llama", tf.LlamaForSequenceClassification, "other"),
        ("llama", tf.LlamaModel, "other"),
        ("llama", type("UsersModel", (tf.LlamaForCausalLM,), {}), "causal"),
    ],
)
def test_the_meaning_of_labels_follows_from_the_class(
    family: str, model_class: Any, head: str
) -> None:
    model = model_class(build(family, "sdpa", {}).config)
    assert head_of(nn.ModuleList([model])) == head


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        ([1, 2], {"sampler": [1, 0]}, "sampler= is chosen here.*data_parallel_rank"),
        ([1, 2], {"batch_sampler": [[1], [0]]}, "batch_sampler= is chosen here"),
        (iter([1, 2]), {}, "only map-style datasets"),
    ],
)
def test_a_loader_that_ranks_of_a_sequence_could_not_share_is_refused(
    dataset: Any, options: dict[str, Any], message: str
) -> None:
    sp, model = SequenceParallel(SequenceParallelConfig()), build("llama", "sdpa", {})
    with wf_transformers.attach(model, sp) as handle, pytest.raises(ValueError, match=message):
        handle.prepare_dataloader(dataset, 1, **options)
