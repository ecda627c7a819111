"""Tiny random models of transformers, and ranks as threads that attach them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from types import MappingProxyType
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.bert import modeling_bert

import wf_transformers
from tests.helpers import run_threads
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import World

VOCAB, SEQLEN = 61, 23  # 23 tokens: padded on 2 and 4 ranks
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
BERT_HAS_OWN_REGISTRY = not hasattr(modeling_bert, "ALL_ATTENTION_FUNCTIONS")
"""Transformers 4: BERT takes its attention from a table of its own, not from that of all models."""
OF_5 = int(tf.__version__.partition(".")[0]) >= 5
BUILD_LOCK = Lock()
"""Held while a rank builds a model: transformers then changes torch's global state."""


def build(
    family: str,
    implementation: str,
    config_changes: Mapping[str, Any],
    state: Mapping[str, Tensor] | None = None,
) -> Any:
    """A float64 model in training mode; random, or with the parameters of `state`."""
    model_class, config_class, sizes = FAMILIES[family]
    with BUILD_LOCK:
        torch.manual_seed(1)
        config = config_class(**{**sizes, "initializer_range": 0.2, **config_changes})
        config._attn_implementation = implementation
        model = model_class(config).double().train()
    if state is not None:
        model.load_state_dict(state)
    return model


def batch(batch_size: int = 1, seqlen: int = SEQLEN, **extra: Any) -> dict[str, Any]:
    """Random tokens, which are their own labels."""
    drawing = torch.Generator().manual_seed(3)
    ids = torch.randint(1, VOCAB, (batch_size, seqlen), generator=drawing)
    return {"input_ids": ids, "labels": ids.clone(), **extra}


def sequence_parallel(comm: Any, layout: str = "zigzag") -> SequenceParallel:
    """All ranks of `comm` share one sequence, on a ring."""
    options = {"sequence_parallel_size": comm.size, "layout": layout, "route": {"name": "ring"}}
    return SequenceParallel(SequenceParallelConfig.from_dict(options), comm)


def tiny(name: str) -> Any:
    """A model of this class with one layer."""
    model_class: Any = getattr(tf, name)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    return model_class(model_class.config_class(**sizes, num_attention_heads=2))


def one_rank() -> SequenceParallel:
    return SequenceParallel(SequenceParallelConfig())


def run_registered(size: int, fn: Callable[..., Any]) -> list[Any]:
    """fn(sp, name) on each of `size` ranks; `name` is registered for the attention of `sp`."""

    def rank(comm: Any) -> Any:
        sp = sequence_parallel(comm)
        with wf_transformers.register(sp, f"wallfacer-{sp.rank}") as registration:
            return fn(sp, registration.name)

    return run_threads(size, rank)


@contextmanager
def registered() -> Iterator[tuple[SequenceParallel, str]]:
    """(sp, name) of one rank; `name` is registered for the attention of `sp`."""
    sp = sequence_parallel(World(1).comm(0))
    with wf_transformers.register(sp) as registration:
        yield sp, registration.name


@contextmanager
def model_on_one_rank(
    family: str, config_changes: Mapping[str, Any] = MappingProxyType({}), apply: bool = False
) -> Iterator[Any]:
    """A model that one rank attends with; after `wf_transformers.apply` if `apply`."""
    with registered() as (sp, name):
        old_bert = family == "bert" and BERT_HAS_OWN_REGISTRY
        model = build(family, "eager" if old_bert else name, config_changes)
        if apply:
            wf_transformers.apply(model, sp)
        yield model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Zeros for experts without tokens, which some releases of transformers 4 do not call."""
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    experts = {n: p for n, p in model.named_parameters() if re.search(r"\.experts\.\d+\.", n)}
    return {n: torch.zeros_like(p) for n, p in experts.items()} | grads


def assert_close(actual: Any, expected: Tensor, name: str) -> None:
    """Equal to 1e-9 of the largest element.

    Gradients that are 0 but for rounding, such as that of a key's bias, are compared to 1e-15.
    """
    assert actual.shape == expected.shape, f"{name}: {actual.shape} instead of {expected.shape}"
    error = (actual - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
    assert error < 1e-9, f"{name}: relative error {error:.1e}"


def stay_in_float64(monkeypatch: Any) -> None:
    """Casts to float32 and bfloat16 leave float64 tensors as they are, in all threads and
    backwards.

    Some models compute in these whatever their dtype. Each rank would round its part of a
    gradient, and the sum of the parts would differ from the gradient of one device.
    """
    as_float, to, as_type = Tensor.float, Tensor.to, Tensor.type

    def narrows(x: Tensor, *args: Any, **kwargs: Any) -> bool:
        given = (*args, kwargs.get("dtype"))
        narrow = torch.float32 in given or torch.bfloat16 in given
        return x.dtype == torch.float64 and narrow

    def float_(x: Tensor) -> Tensor:
        return as_float(x) if x.dtype == torch.float32 else x.double()

    monkeypatch.setattr(Tensor, "float", float_)
    monkeypatch.setattr(
        Tensor, "to", lambda x, *a, **k: x if narrows(x, *a, **k) else to(x, *a, **k)
    )
    monkeypatch.setattr(
        Tensor, "type", lambda x, *a, **k: x if narrows(x, *a, **k) else as_type(x, *a, **k)
    )
    softmax, grid_sample = functional.softmax, functional.grid_sample

    def softmax_(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return softmax(x, *args, **(kwargs | {"dtype": None} if narrows(x, **kwargs) else kwargs))

    monkeypatch.setattr(functional, "softmax", softmax_)
    monkeypatch.setattr(
        functional, "grid_sample", lambda x, at, **k: grid_sample(x, at.to(x.dtype), **k)
    )
