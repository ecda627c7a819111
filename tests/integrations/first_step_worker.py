"""One rank of two: the first step of Trainers whose loss would silently differ on two ranks.

python first_step_worker.py FOLDER, with FOLDER/cases.json, a list of `Step`s as objects; rank 0
writes FOLDER/outcomes.json, a list of what `outcome` returns.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss

import wf_accelerate
from tests.integrations import removed_safeguards as removed
from tests.integrations.deepspeed_jobs import SEQLEN, VOCABULARY, tiny_llama
from tests.integrations.deepspeed_trainer import Samples, leave_job, training_arguments

Row = dict[str, Tensor]


@dataclass(frozen=True)
class Step:
    """A first training step of a configuration."""

    name: str
    """Of CONFIGURATIONS."""
    zero: int | None = None
    """DeepSpeed's stage; None: under accelerate's DDP."""
    safeguarded: bool = True
    """Whether the check or correction that the configuration needs is in place."""
    verify: bool | str = "strict"


class FullSamples(Samples):
    """Without padding; every token has a label."""

    def __getitem__(self, index: int) -> Row:
        ids = super().__getitem__(index)["input_ids"]
        return {"input_ids": ids, "labels": ids.clone()}


class PrefixMaskSamples(FullSamples):
    """With a mask (1, S, S), True where a key is seen: causal, but the first six see each other."""

    def __getitem__(self, index: int) -> Row:
        seen = torch.ones(1, SEQLEN, SEQLEN, dtype=torch.bool).tril()
        seen[:, :6, :6] = True
        return super().__getitem__(index) | {"attention_mask": seen}


class WeightedSamples(FullSamples):
    """With a weight for each token."""

    def __getitem__(self, index: int) -> Row:
        weights = torch.linspace(0.1, 2.0, SEQLEN)
        return super().__getitem__(index) | {"token_weights": weights}


class LabelledPaddingSamples(FullSamples):
    """All tokens but the first 9 are padding, where a collator left the labels."""

    def __getitem__(self, index: int) -> Row:
        return super().__getitem__(index) | {"attention_mask": (torch.arange(SEQLEN) < 9).long()}


def weighted_loss(
    logits: Tensor, labels: Tensor, vocab_size: int, token_weights: Any = None, **_: Any
) -> Tensor:
    token_losses = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="none"
    )
    weights = torch.ones_like(labels) if token_weights is None else token_weights
    return (token_losses * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()


def z_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    entropy = ForCausalLMLoss(logits, labels, vocab_size)
    return entropy + 0.1 * logits.logsumexp(-1).square()[labels != -100].mean()


class DoubledLoss(LlamaForCausalLM):
    """Sets the loss in its forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output: Any = super().forward(*args, **kwargs)
        output.loss = None if output.loss is None else 2 * output.loss
        return output


class EntropyTrainer(Trainer):
    """Adds a mean over logits, which rewards even use of the vocabulary, to the output's loss."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        output = model(**inputs)
        return output.loss + output.logits.softmax(-1).mean(dim=(0, 1)).square().sum()


class WholeLogitsTrainer(EntropyTrainer):
    """Asks for the logits of all ranks, as the refusal says."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, {**inputs, "whole_logits": True}, *args, **kwargs)


class InnerModelTrainer(Trainer):
    """Calls the model inside, and computes the loss from its hidden states."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        llama = getattr(model, "module", model)
        states = llama.model(input_ids=inputs["input_ids"]).last_hidden_state
        return weighted_loss(llama.lm_head(states), inputs["labels"], VOCABULARY)


def llama(model_class: type = LlamaForCausalLM, loss: Any = None, **config: Any) -> Any:
    model = tiny_llama(**config)
    model.__class__ = model_class
    if loss is not None:
        model.loss_function = loss
    return model


def gpt2() -> Any:
    """Drops a tenth of the embeddings and of every layer's output."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4))


@dataclass(frozen=True)
class Configuration:
    """A model, its data and its Trainer, with the safeguard that makes it right on two ranks."""

    without_safeguard: Callable[[], removed.Context]
    make_model: Callable[[], Any] = llama
    samples: type = FullSamples
    trainer: type = Trainer
    safeguarded_trainer: type | None = None
    """The Trainer beside the safeguard, if that refuses `trainer`; None: `trainer`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """More training arguments."""


CONFIGURATIONS = {
    "mask": Configuration(removed.ignored_dense_masks, samples=PrefixMaskSamples),
    "neftune": Configuration(
        removed.noise_of_local_length, arguments={"neftune_noise_alpha": 10.0}
    ),
    "entropy": Configuration(
        removed.usable_local_logits,
        trainer=EntropyTrainer,
        safeguarded_trainer=WholeLogitsTrainer,
    ),
    "token_weights": Configuration(
        removed.unnoticed_custom_losses, partial(llama, loss=weighted_loss), WeightedSamples
    ),
    "z_loss": Configuration(removed.unnoticed_custom_losses, partial(llama, loss=z_loss)),
    "own_loss": Configuration(removed.unnoticed_custom_losses, partial(llama, DoubledLoss)),
    "inner_call": Configuration(removed.allowed_inner_calls, trainer=InnerModelTrainer),
    "dropout": Configuration(nullcontext, partial(llama, attention_dropout=0.3)),
    "equal_random_states": Configuration(removed.equal_random_states, gpt2),
    "padded_labels": Configuration(
        removed.counted_labels_at_padding, samples=LabelledPaddingSamples
    ),
}


def outcome(step: Step, folder: Path) -> str:
    """Take the step; return "trained: LOSS, GRADIENT NORM", or the error that it raised.

    The loss is `training_loss`: the one in the Trainer's log is rounded.
    """
    AcceleratorState._reset_state(False)
    GradientState._reset_state()
    configuration = CONFIGURATIONS[step.name]
    trainer_class = configuration.trainer
    if step.safeguarded and configuration.safeguarded_trainer:
        trainer_class = configuration.safeguarded_trainer
    wallfacer = {"sequence_parallel_size": 2, "route": "ring", "verify": step.verify}
    options = dict(configuration.arguments)
    if step.zero is not None:
        options["deepspeed"] = deepspeed_config(step.zero) | {"wallfacer": wallfacer}
    arguments: TrainingArguments = training_arguments(str(folder / "trainer"), **options)
    arguments.max_steps = 1
    arguments.remove_unused_columns = False
    with nullcontext() if step.safeguarded else configuration.without_safeguard():
        try:
            trainer = trainer_class(
                configuration.make_model(), arguments, train_dataset=configuration.samples(8)
            )
            if step.zero is None:
                wf_accelerate.connect_trainer(trainer, wallfacer)
            loss = trainer.train().training_loss
        except (ValueError, NotImplementedError) as error:
            return f"{type(error).__name__}: {error}"
    return f"trained: {loss}, {trainer.state.log_history[0].get('grad_norm')}"


def deepspeed_config(zero: int) -> dict[str, Any]:
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": zero, "stage3_param_persistence_threshold": 0},
    }


def main(folder: Path) -> None:
    steps = [Step(**case) for case in json.loads((folder / "cases.json").read_text())]
    outcomes = [outcome(step, folder) for step in steps]
    if AcceleratorState().is_main_process:
        (folder / "outcomes.json").write_text(json.dumps(outcomes))
    leave_job()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
