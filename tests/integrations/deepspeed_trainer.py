"""A Hugging Face Trainer script that knows nothing of sequence parallelism.

python deepspeed_trainer.py OUT.json ACCUMULATION [DEEPSPEED.json]
"""

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

from tests.integrations.deepspeed_jobs import SEQLEN, VOCABULARY, tiny_llama

STEPS = 4
NUM_EVALUATED = 3  # odd: the last batch of two groups lacks a sample


class Samples(torch.utils.data.Dataset):
    """Random tokens; the samples have different numbers of tokens and labels, padded on the right.

    Of every three samples two have labels that are masked at the beginning, as a prompt's are.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(index)
        ids = torch.randint(VOCABULARY, (SEQLEN,), generator=random)
        mask = (torch.arange(SEQLEN) < SEQLEN - index % 5 * 4).long()
        labels = ids.masked_fill(mask == 0, -100)
        labels[: index % 3 * 6] = -100
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def training_arguments(
    folder: str, arguments_class: type[TrainingArguments] = TrainingArguments, **options: Any
) -> TrainingArguments:
    """A few steps on the CPU with one sample per process; `options` are added or override."""
    options = {"average_tokens_across_devices": True, "save_strategy": "no"} | options
    return arguments_class(
        output_dir=folder,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        max_steps=STEPS,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )


def assert_logits_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare logits (n, S, vocabulary) of `Samples(n)` after `STEPS` in float32, to 0.1%.

    Logits at padding are not compared: nothing defines them.
    """
    samples = Samples(len(actual))
    valid = torch.stack([samples[index]["attention_mask"] for index in range(len(samples))]) == 1
    assert (actual - expected)[valid].abs().max() < 1e-3 * expected.abs().max()


def leave_job() -> None:
    """Destroy the group: its threads may abort the process if they still run when Python ends."""
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    out, accumulation, *config = sys.argv[1:]
    options = {"deepspeed": config[0] if config else None}
    arguments = training_arguments(
        out + ".folder", gradient_accumulation_steps=int(accumulation), **options
    )
    evaluated = Samples(NUM_EVALUATED)
    trainer = Trainer(tiny_llama(), arguments, train_dataset=Samples(32), eval_dataset=evaluated)
    loss = trainer.train().training_loss  # the losses in the log are rounded, this one is not
    result = {"loss": loss, "steps": trainer.state.log_history[:STEPS], "eval": trainer.evaluate()}
    result["logits"] = trainer.predict(evaluated).predictions.tolist()
    if trainer.is_world_process_zero():
        with open(out, "w") as file:
            json.dump(result, file)
    leave_job()


if __name__ == "__main__":
    main()
