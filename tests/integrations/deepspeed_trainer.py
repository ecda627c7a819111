"""A Hugging Face Trainer script that knows nothing of sequence parallelism.

python deepspeed_trainer.py OUT.json ACCUMULATION [DEEPSPEED.json]
"""

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VOCABULARY, SEQLEN = 32, 44


class Text(torch.utils.data.Dataset):
    """Samples of different lengths, padded on the right; some labels are masked."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(index)
        ids = torch.randint(VOCABULARY, (SEQLEN,), generator=draw)
        mask = (torch.arange(SEQLEN) < SEQLEN - index % 5 * 4).long()
        labels = ids.masked_fill(mask == 0, -100)
        labels[: index % 3 * 6] = -100
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def model() -> LlamaForCausalLM:
    """The same in every process."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    words = shape | heads | {"initializer_range": 0.2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **words))


def arguments(folder: str, **more: Any) -> TrainingArguments:
    words = {"average_tokens_across_devices": True, "save_strategy": "no"} | more
    return TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        max_steps=6,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **words,
    )


def assert_close_tokens(logits: torch.Tensor, wanted: torch.Tensor) -> None:
    """Predictions (n, S, vocabulary) of `Text`; what they are at padding is nobody's business."""
    valid = torch.stack(
        [Text(len(logits))[index]["attention_mask"] for index in range(len(logits))]
    )
    assert (logits - wanted)[valid == 1].abs().max() < 1e-3 * wanted.abs().max()


def leave() -> None:
    """Leave the job: threads of a group that is there when Python ends may abort the process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    out, accumulation, *config = sys.argv[1:]
    more = {"deepspeed": config[0] if config else None}
    settings = arguments(out + ".folder", gradient_accumulation_steps=int(accumulation), **more)
    # 7: two groups' last batch lacks a sample
    trainer = Trainer(model(), settings, train_dataset=Text(32), eval_dataset=Text(7))
    loss = trainer.train().training_loss  # not rounded, as the losses in the log are
    result = {"loss": loss, "steps": trainer.state.log_history[:6], "eval": trainer.evaluate()}
    result["predictions"] = trainer.predict(Text(7)).predictions.tolist()
    if trainer.is_world_process_zero():
        with open(out, "w") as file:
            json.dump(result, file)
    leave()


if __name__ == "__main__":
    main()
