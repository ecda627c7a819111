"""One rank of a job of test_trl.py: TRL's SFTTrainer.

python trl_worker.py FOLDER, with FOLDER/cases.json; rank 0 writes FOLDER/NAME.json. A case has a
"name", whether it is "packed", and the configuration "wallfacer", null for a job without it.
"""

import sys
from pathlib import Path
from typing import Any

import datasets
from trl import SFTConfig, SFTTrainer

import wf_accelerate
from tests.integrations.accelerate_worker import run_cases
from tests.integrations.deepspeed_jobs import SEQLEN, tiny_llama
from tests.integrations.deepspeed_trainer import NUM_EVALUATED, Samples
from tests.integrations.trl_jobs import RELEASE, number_tokenizer, taken

METRICS = ("loss", "grad_norm", "num_tokens", "mean_token_accuracy")
METRICS += ("entropy",) if RELEASE >= (0, 20) else ()  # TRL 0.19 has none
EVAL_METRICS = [f"eval_{name}" for name in METRICS if name != "grad_norm"]
STEPS = 4


def unpadded_samples(size: int, packed: bool) -> datasets.Dataset:
    """`Samples` without padding; packed ones have no labels, so that all tokens are learnt."""
    samples, rows = Samples(size), []
    for index in range(size):
        sample = samples[index]
        length = int(sample["attention_mask"].sum())
        keys = ("input_ids",) if packed else ("input_ids", "labels")
        rows.append({key: sample[key][:length].tolist() for key in keys})
    return datasets.Dataset.from_list(rows)


def train(case: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train and evaluate; return the metrics of each step and of the evaluation."""
    packed = case["packed"]
    loss = taken(SFTConfig, loss_type="nll")  # not chunked, as from 1.7 to 1.14
    length = {"packing": True, "max_length": 2 * SEQLEN} if packed else {"max_length": None}
    arguments = SFTConfig(
        output_dir=folder,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        **length,
        **loss,
    )
    trainer = SFTTrainer(
        tiny_llama(),
        arguments,
        train_dataset=unpadded_samples(64, packed),
        eval_dataset=unpadded_samples(NUM_EVALUATED, packed),
        processing_class=number_tokenizer(),
    )
    config = case["wallfacer"]
    handle = wf_accelerate.connect_trainer(trainer, config) if config else None
    trainer.train()
    trainer.evaluate()
    return {
        "steps": [
            {key: step[key] for key in METRICS} for step in trainer.state.log_history[:STEPS]
        ],
        "eval": {key: trainer.state.log_history[-1][key] for key in EVAL_METRICS},
        "bytes_sent": handle.report() if handle else {},
    }


if __name__ == "__main__":
    run_cases(Path(sys.argv[1]), train)
