"""What the tests of TRL's SFTTrainer run on every rank.

python trl_worker.py FOLDER, with FOLDER/cases.json: a list of cases. A case has a "name", whether
it is "packed", and the "words" of WallFacer, none for a job without us.
"""

import sys
from pathlib import Path
from typing import Any

import datasets
from trl import SFTConfig, SFTTrainer

import wf_accelerate
from tests.integrations.accelerate_worker import run_cases
from tests.integrations.deepspeed_trainer import Text, model
from tests.integrations.trl_jobs import tokenizer

METRICS = ("loss", "grad_norm", "entropy", "num_tokens", "mean_token_accuracy")
KEYS = (*METRICS, *(f"eval_{key}" for key in METRICS if key != "grad_norm"))


def texts(size: int, packed: bool) -> datasets.Dataset:
    """Samples of `Text`, as long as they are; some labels are masked where they are not packed."""
    rows = []
    for index in range(size):
        sample = Text(size)[index]
        valid = int(sample["attention_mask"].sum())
        keys = ("input_ids",) if packed else ("input_ids", "labels")
        rows.append({key: sample[key][:valid].tolist() for key in keys})
    return datasets.Dataset.from_list(rows)


def train(case: dict[str, Any], folder: str) -> dict[str, Any]:
    """Training and an evaluation."""
    packed = {"packing": True, "max_length": 88} if case["packed"] else {"max_length": None}
    settings = SFTConfig(
        output_dir=folder,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=2,
        max_steps=4,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        **packed,
    )
    trainer = SFTTrainer(
        model(),
        settings,
        train_dataset=texts(64, case["packed"]),
        eval_dataset=texts(7, case["packed"]),
        processing_class=tokenizer(),
    )
    connected = wf_accelerate.connect_trainer(trainer, case["words"]) if case["words"] else None
    trainer.train()
    steps = [{key: one[key] for key in METRICS} for one in trainer.state.log_history[:4]]
    evaluated = {key: value for key, value in trainer.evaluate().items() if key in KEYS}
    return {"steps": steps, "eval": evaluated, "sent": connected.report() if connected else {}}


if __name__ == "__main__":
    run_cases(Path(sys.argv[1]), train)
