"""Tiny random models of every family, on one device and on ranks as threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn
from transformers.models.bert import modeling_bert

import wf_transformers
from tests.helpers import run_threads
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.parallel.data import prepare_batch
from wf_backends.parallel.loss import count_valid, token_loss

VOCAB, SEQLEN = 61, 23  # 23: needs padding on 2 and 4 ranks
SMALL = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": VOCAB, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
LLAMA = {**SMALL, **HEADS, "attention_dropout": 0.0}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCAB}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
BERT_DROPOUT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}

DECODERS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (tf.LlamaForCausalLM, tf.LlamaConfig, LLAMA),
    "qwen2": (tf.Qwen2ForCausalLM, tf.Qwen2Config, LLAMA),
    "qwen3": (tf.Qwen3ForCausalLM, tf.Qwen3Config, {**LLAMA, "head_dim": 16}),
    "mistral": (tf.MistralForCausalLM, tf.MistralConfig, {**LLAMA, "sliding_window": 5}),
    "gpt2": (tf.GPT2LMHeadModel, tf.GPT2Config, {**GPT2, **NO_DROPOUT}),
    "gpt_neox": (
        tf.GPTNeoXForCausalLM,
        tf.GPTNeoXConfig,
        {**SMALL, "num_attention_heads": 4, "attention_dropout": 0.0, "hidden_dropout": 0.0},
    ),
}
BERT = (
    tf.BertForMaskedLM,
    tf.BertConfig,
    {**SMALL, **BERT_DROPOUT, "num_attention_heads": 4, "max_position_embeddings": 64},
)
FAMILIES = {**DECODERS, "bert": BERT}
BERT_ASKS_NO_REGISTRY = not hasattr(modeling_bert, "ALL_ATTENTION_FUNCTIONS")
BUILDING = Lock()  # transformers changes torch's global state while it builds a model


@dataclass(frozen=True)
class Job:
    """One comparison: a model family, how it is spread, and what is asked of it."""

    family: str
    size: int = 2
    layout: str = "zigzag"
    apply: bool = False
    checkpoint: bool = False
    plain_checkpoint: bool = False
    old_bert: str = "eager"
    """How a BERT that asks no registry of all models is built; "": by the registered name."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the model's config."""


def build(family: str, implementation: str, more: Mapping[str, Any], state: Any = None) -> Any:
    """A float64 model in training mode; random, or with the parameters of `state`."""
    make, make_config, words = FAMILIES[family]
    with BUILDING:
        torch.manual_seed(1)
        config = make_config(**{**words, "initializer_range": 0.2, **more})
        config._attn_implementation = implementation
        model = make(config).double().train()
    if state is not None:
        model.load_state_dict(state)
    return model


def batch(size: int = 1, seqlen: int = SEQLEN, **more: Any) -> dict[str, Any]:
    ids = torch.randint(1, VOCAB, (size, seqlen), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids.clone(), **more}


def sequence_parallel(comm: Any, layout: str = "zigzag") -> SequenceParallel:
    words = {"sequence_parallel_size": comm.size, "layout": layout, "route": {"name": "ring"}}
    return SequenceParallel(SequenceParallelConfig.from_dict(words), comm)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def one_device(job: Job, given: dict[str, Any]) -> tuple[Any, Tensor, Tensor, dict[str, Tensor]]:
    """(state, logits, loss, gradients) of the same model with torch's attention, document by
    document."""
    model = build(job.family, "sdpa", job.more)
    whole = prepare_batch(given, multiple=1)
    mask = given.get("attention_mask", torch.ones_like(given["input_ids"]))
    borders = given.get("cu_seqlens") or (0, mask.shape[1])
    logits = torch.cat(
        [
            model(
                input_ids=given["input_ids"][:, a:b],
                position_ids=whole["position_ids"][:, a:b],
                attention_mask=mask[:, a:b],
            ).logits
            for a, b in zip(borders, borders[1:], strict=False)
        ],
        dim=1,
    )
    loss = token_loss(logits, whole["labels"], count_valid(whole["labels"]))
    loss.backward()
    return model.state_dict(), logits.detach(), loss.detach(), gradients(model)


def on_ranks(job: Job, given: dict[str, Any], state: Any) -> list[tuple[Tensor, Tensor, Any]]:
    """(logits of all tokens, this rank's share of the loss, its gradients) by rank."""
    return run_threads(job.size, _one_rank, job, given, state)


def _one_rank(comm: Any, job: Job, given: dict[str, Any], state: Any) -> Any:
    sp = sequence_parallel(comm, job.layout)
    with wf_transformers.register(sp, f"wallfacer-{sp.rank}") as registration:
        old_bert = job.family == "bert" and BERT_ASKS_NO_REGISTRY
        name = (old_bert and job.old_bert) or registration.name
        model = build(job.family, name, job.more, state)
        application = wf_transformers.apply(model, sp) if job.apply else None
        if job.checkpoint:
            carried = application is not None and not job.plain_checkpoint
            words = application.checkpoint_kwargs if carried else {"use_reentrant": False}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=words)
        local = sp.shard_batch(given)
        logits = model(**wf_transformers.forward_kwargs(model, local)).logits
        loss = sp.loss(logits, local["labels"])
        loss.backward()
        full = sp.unshard(logits.detach(), dim=1)
    return full, loss.detach(), gradients(model)


def assert_equal(job: Job, given: dict[str, Any], valid: Tensor | None = None) -> None:
    """The job on its ranks gives the logits, loss and gradients of one device to 1e-9."""
    state, logits, loss, grads = one_device(job, given)
    results = on_ranks(job, given, state)
    valid = torch.ones(logits.shape[:2], dtype=torch.bool) if valid is None else valid
    for full, _, _ in results:
        assert_close(full[:, : logits.shape[1]][valid], logits[valid], "logits")
    assert_close(sum(share for _, share, _ in results), loss, "loss")
    assert grads.keys() == results[0][2].keys()
    for name, grad in grads.items():
        assert_close(sum(g[name] for _, _, g in results), grad, name)


def assert_close(ours: Any, theirs: Tensor, what: str) -> None:
    """Relative to the largest element; some gradients (of key biases) are 0 but for rounding."""
    error = (ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6)
    assert error < 1e-9, f"{what}: relative error {error:.1e}"


def stay_in_float64(monkeypatch: Any) -> None:
    """Have models round nothing to float32 on their way, as they do whatever their dtype.

    A gradient that ranks have in parts is otherwise rounded part by part.
    """
    as_float, to, as_type = Tensor.float, Tensor.to, Tensor.type

    def rounds(x: Tensor, *words: Any, **more: Any) -> bool:
        return x.dtype == torch.float64 and torch.float32 in (*words, more.get("dtype"))

    def other(x: Tensor) -> Tensor:
        return as_float(x) if x.dtype == torch.float32 else x.double()

    monkeypatch.setattr(Tensor, "float", other)
    monkeypatch.setattr(
        Tensor, "to", lambda x, *a, **k: x if rounds(x, *a, **k) else to(x, *a, **k)
    )
    monkeypatch.setattr(
        Tensor, "type", lambda x, *a, **k: x if rounds(x, *a, **k) else as_type(x, *a, **k)
    )


def call(size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """fn(sp, name of a registration for it, *args) on every rank."""

    def rank(comm: Any) -> Any:
        sp = sequence_parallel(comm)
        with wf_transformers.register(sp, f"wallfacer-{sp.rank}") as registration:
            return fn(sp, registration.name, *args)

    return run_threads(size, rank)
