"""Trainers whose loss would silently be another on two ranks: the first step of each.

python silent_worker.py FOLDER, whose cases.json says which; found.json gets what rank 0 was told.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.loss.loss_utils import ForCausalLMLoss

import wf_accelerate
from tests.integrations.deepspeed_jobs import SEQLEN, VOCABULARY
from tests.integrations.deepspeed_trainer import Samples, leave_job, training_arguments
from wf_transformers.handle import Handle
from wf_transformers.rng import RankRng
from wf_transformers.whole_batches import hooks as whole_batches

Rows = dict[str, Tensor]
EMPTY: dict[str, Any] = {}


class Full(Samples):
    """Samples without padding, and as many labels in each."""

    def __getitem__(self, index: int) -> Rows:
        ids = super().__getitem__(index)["input_ids"]
        return {"input_ids": ids, "labels": ids.clone()}


class Prefix(Full):
    """A mask (1, S, S), True where a token is seen: causal, but the first six see each other."""

    def __getitem__(self, index: int) -> Rows:
        seen = torch.ones(1, SEQLEN, SEQLEN, dtype=torch.bool).tril()
        seen[:, :6, :6] = True
        return super().__getitem__(index) | {"attention_mask": seen}


class Weighted(Full):
    """How much each token counts."""

    def __getitem__(self, index: int) -> Rows:
        weights = torch.linspace(0.1, 2.0, SEQLEN)
        return super().__getitem__(index) | {"token_weights": weights}


class PaddedLabels(Full):
    """Labels at padding, which a collator left there."""

    def __getitem__(self, index: int) -> Rows:
        return super().__getitem__(index) | {"attention_mask": (torch.arange(SEQLEN) < 9).long()}


def weighted(
    logits: Tensor, labels: Tensor, vocab_size: int, token_weights: Any = None, **_: Any
) -> Tensor:
    by_token = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="none"
    )
    weights = torch.ones_like(labels) if token_weights is None else token_weights
    return (by_token * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()


def z_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    plain = ForCausalLMLoss(logits, labels, vocab_size)
    return plain + 0.1 * logits.logsumexp(-1).square()[labels != -100].mean()


class Doubled(LlamaForCausalLM):
    """Sets its own loss."""

    def forward(self, *args: Any, **words: Any) -> Any:
        output: Any = super().forward(*args, **words)
        output.loss = None if output.loss is None else 2 * output.loss
        return output


class Entropy(Trainer):
    """Even use of the vocabulary, by a mean over logits, beside the loss of the output."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **words: Any) -> Any:
        output = model(**inputs, **WHOLE)
        return output.loss + output.logits.softmax(-1).mean(dim=(0, 1)).square().sum()


class Chunked(Trainer):
    """Hidden states of the model inside, and a loss of them."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **words: Any) -> Any:
        inner = getattr(model, "module", model)
        states = inner.model(input_ids=inputs["input_ids"]).last_hidden_state
        return weighted(inner.lm_head(states), inputs["labels"], VOCABULARY)


WHOLE: dict[str, Any] = {}
"""What `Entropy` says in its call: logits of all ranks, or nothing."""


def llama(kind: type = LlamaForCausalLM, loss: Any = None, **more: Any) -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    model = kind(LlamaConfig(vocab_size=VOCABULARY, **shape, **heads, **more))
    if loss is not None:
        model.loss_function = loss
    return model


def gpt2() -> Any:
    """Drops a tenth of embeddings and of what layers add."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4))


def dropping_masks() -> Any:
    """A dense mask is dropped."""
    return patch.object(
        whole_batches,
        "with_slices",
        lambda given, _: {key: x for key, x in given.items() if key != "attention_mask"},
    )


@contextmanager
def local_means() -> Iterator[None]:
    """Logits of this rank's tokens, as before they were hidden."""
    with patch.object(whole_batches.WholeBatchHooks, "hides_local_logits", False):
        yield


@contextmanager
def inner_calls() -> Iterator[None]:
    """Models inside one that takes whole batches are called with whole rows."""
    with (
        patch.object(whole_batches, "inner_models", lambda _: ()),
        patch("wf_transformers.attach.inner_models", lambda _: ()),
        patch("wf_transformers.documents.Documents.check_rows", lambda *_: None),
        patch.object(whole_batches.WholeBatchHooks, "_refuse_inner_call", lambda *_: None),
    ):
        yield


def like_draws() -> Any:
    """Ranks draw from the state that the Trainer's seed gives to all."""
    return patch.object(RankRng, "enter", lambda *_: None)


def loud_noise() -> Any:
    """NEFTune's noise, scaled by the length that a rank sees."""
    return patch.object(whole_batches.WholeNoise, "enter", lambda *_: None)


def plain_losses() -> Any:
    return patch.object(whole_batches, "custom_loss_reason", lambda *_: None)


def untold_labels() -> Any:
    return patch.object(Handle, "without_padded_labels", lambda _, batch: dict(batch))


CASES: dict[str, tuple[Callable[[], Any], type, type, dict[str, Any], Callable[[], Any]]] = {
    "mask": (llama, Prefix, Trainer, EMPTY, dropping_masks),
    "neftune": (llama, Full, Trainer, {"neftune_noise_alpha": 10.0}, loud_noise),
    "entropy": (llama, Full, Entropy, EMPTY, local_means),
    "token_weights": (lambda: llama(loss=weighted), Weighted, Trainer, EMPTY, plain_losses),
    "z_loss": (lambda: llama(loss=z_loss), Full, Trainer, EMPTY, plain_losses),
    "own_loss": (lambda: llama(Doubled), Full, Trainer, EMPTY, plain_losses),
    "inner_call": (llama, Full, Chunked, EMPTY, inner_calls),
    "dropout": (partial(llama, attention_dropout=0.3), Full, Trainer, EMPTY, nullcontext),
    "like_draws": (gpt2, Full, Trainer, EMPTY, like_draws),
    "padded_labels": (llama, PaddedLabels, Trainer, EMPTY, untold_labels),
}
"""Model, data, Trainer, its arguments, and what takes the cure away."""


def told(
    folder: Path, name: str, cured: bool, zero: int | None, verify: bool | str = "strict"
) -> str:
    """What one step raised, or its loss and the norm of its gradient.

    Args:
        zero: DeepSpeed's stage; None: under DDP.
    """
    make, data, kind, more, uncured = CASES[name]
    AcceleratorState._reset_state(False)
    GradientState._reset_state()
    words = {"sequence_parallel_size": 2, "route": "ring", "verify": verify}
    given = {} if zero is None else {"deepspeed": deepspeed_config(zero) | {"wallfacer": words}}
    settings: TrainingArguments = training_arguments(str(folder / "trainer"), **more, **given)
    settings.max_steps = 1
    settings.remove_unused_columns = False
    WHOLE.clear()
    WHOLE.update({"whole_logits": True} if cured and name == "entropy" else {})
    with nullcontext() if cured else uncured():
        try:
            trainer = kind(make(), settings, train_dataset=data(8))
            if zero is None:
                wf_accelerate.connect_trainer(trainer, words)
            trainer.train()
        except (ValueError, NotImplementedError) as error:
            return f"{type(error).__name__}: {error}"
    step = trainer.state.log_history[0]
    return f"trained: {step['loss']}, {step.get('grad_norm')}"


def deepspeed_config(zero: int) -> dict[str, Any]:
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": zero, "stage3_param_persistence_threshold": 0},
    }


def main(folder: Path) -> None:
    cases = json.loads((folder / "cases.json").read_text())
    found = [told(folder, *case) for case in cases]
    if AcceleratorState().is_main_process:
        (folder / "found.json").write_text(json.dumps(found))
    leave_job()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
