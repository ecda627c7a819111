"""What the tests of TRL's DPO, GRPO and reward trainers run on every rank, in float64.

python preference_worker.py FOLDER, with FOLDER/cases.json: a list of cases. A case has a "name", a
"kind" of trainer, its "options", and the "words" of WallFacer, none for a job without us.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import torch
import trl
from accelerate import PartialState
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForSequenceClassification
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer

import wf_accelerate
from tests.integrations import trl_jobs
from tests.integrations.accelerate_worker import run_cases
from tests.integrations.deepspeed_trainer import VOCABULARY, model

STEPS, SAMPLES = 3, 24
HAS_FUSED_HEAD = int(version("trl").split(".")[0]) > 0  # and prompts are given their length


def tokenizer(side: str = "right") -> Any:
    return trl_jobs.tokenizer(bos_token="t2", padding_side=side)


def text(seed: int, length: int) -> str:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (length,), generator=draw).tolist()
    return " ".join(f"t{n}" for n in ids)


def preferences() -> datasets.Dataset:
    """Prompts and answers of different lengths."""
    rows = [
        {
            "prompt": text(3 * n, 5 + n % 4 * 3),
            "chosen": " " + text(3 * n + 1, 18 - n % 3 * 5),
            "rejected": " " + text(3 * n + 2, 9 + n % 5 * 4),
        }
        for n in range(SAMPLES)
    ]
    return datasets.Dataset.from_list(rows)


def scorer() -> LlamaForSequenceClassification:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    words = shape | {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, num_labels=1, pad_token_id=0, **words)
    return LlamaForSequenceClassification(config)


def tokenized(rows: datasets.Dataset) -> datasets.Dataset:
    """As RewardTrainer takes them."""
    token = tokenizer()

    def pair(row: dict[str, str]) -> dict[str, Any]:
        found = {}
        for kind in ("chosen", "rejected"):
            its = token(row["prompt"] + row[kind])
            found |= {f"input_ids_{kind}": its["input_ids"]}
            found |= {f"attention_mask_{kind}": its["attention_mask"]}
        return found

    return rows.map(pair)


def reference() -> Any:
    """Another model than the one that is trained."""
    found = model().double().eval()
    with torch.no_grad():
        for p in found.parameters():
            p.mul_(1.1)
    return found


def dpo(words: dict[str, Any], options: dict[str, Any]) -> Any:
    settings = DPOConfig(**words, **options, disable_dropout=True)
    rows: Any = {"train_dataset": preferences(), "eval_dataset": preferences().select(range(4))}
    beside: Any = {"processing_class": tokenizer(), **rows}
    return Recording(DPOTrainer)(model().double(), reference(), settings, **beside)


def dpo_lora(words: dict[str, Any], options: dict[str, Any]) -> Any:
    """The reference is the model without its adapter."""
    adapter = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    settings = DPOConfig(**words, **options)
    rows: Any = {"train_dataset": preferences(), "processing_class": tokenizer()}
    torch.manual_seed(0)  # the adapter is drawn
    trainer = Recording(DPOTrainer)(model().double(), None, settings, peft_config=adapter, **rows)
    trainer.model.double()
    return trainer


def falling(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """A reward: how often a token is below the one before."""
    return [float(sum(a > b for a, b in zip(ids, ids[1:], strict=False))) for ids in completion_ids]


def grpo(words: dict[str, Any], options: dict[str, Any]) -> Any:
    return policy_trainer(GRPOTrainer, GRPOConfig, words, options)


def rloo(words: dict[str, Any], options: dict[str, Any]) -> Any:
    return policy_trainer(trl.RLOOTrainer, trl.RLOOConfig, words, options)


def policy_trainer(kind: type, config: type, words: dict[str, Any], options: dict[str, Any]) -> Any:
    lengths = {"max_completion_length": 20}
    lengths |= {} if HAS_FUSED_HEAD else {"max_prompt_length": 16}
    settings = config(**words, **options, **lengths)
    policy, folder, job = model().double(), f"{words['output_dir']}-policy", PartialState()
    if job.is_main_process:
        policy.save_pretrained(folder)  # TRL loads its reference from there
    job.wait_for_everyone()
    policy.config._name_or_path = folder
    trainer = Recording(kind)(
        policy,
        falling,
        settings,
        train_dataset=preferences().remove_columns(["chosen", "rejected"]),
        processing_class=tokenizer("left"),
    )
    if trainer.ref_model is not None:
        trainer.ref_model.double()
    return trainer


def reward(words: dict[str, Any], options: dict[str, Any]) -> Any:
    settings = RewardConfig(**words, **options, max_length=64)
    rows = preferences() if HAS_FUSED_HEAD else tokenized(preferences())
    return Recording(RewardTrainer)(
        scorer().double(), settings, train_dataset=rows, processing_class=tokenizer()
    )


def kto(words: dict[str, Any], options: dict[str, Any]) -> Any:
    settings = trl.KTOConfig(**words, **options)
    rows = [
        {"prompt": one["prompt"], "completion": one[kind], "label": kind == "chosen"}
        for one in preferences()
        for kind in ("chosen", "rejected")
    ]
    return Recording(trl.KTOTrainer)(
        model().double(),
        reference(),
        settings,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
    )


KINDS: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]]
KINDS = {"dpo": dpo, "dpo_lora": dpo_lora, "grpo": grpo, "rloo": rloo, "kto": kto, "reward": reward}


def Recording(kind: type) -> type:
    """A trainer that keeps its losses, which the log rounds."""

    class Recorded(kind):  # type: ignore[misc]
        losses: list[float]

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            self.losses = [*getattr(self, "losses", []), float(loss)]
            return loss

    return Recorded


def train(case: dict[str, Any], folder: str) -> dict[str, Any]:
    words = {
        "output_dir": folder,
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "optim": "sgd",
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
    }
    trainer = KINDS[case["kind"]](words, case["options"])
    before = torch.cat([p.detach().flatten().clone() for p in trainer.model.parameters()])
    connected = wf_accelerate.connect_trainer(trainer, case["words"]) if case["words"] else None
    trainer.train()
    moved = torch.cat([p.detach().flatten() for p in trainer.model.parameters()]) - before
    evaluated = trainer.evaluate() if trainer.eval_dataset is not None else {}
    return {
        "losses": trainer.losses,
        "moved": moved.tolist(),
        "log": [
            {k: v for k, v in one.items() if "time" not in k}
            for one in trainer.state.log_history[:STEPS]
        ],
        "eval": {k: v for k, v in evaluated.items() if "runtime" not in k and "second" not in k},
        "sent": connected.report() if connected else {},
    }


if __name__ == "__main__":
    run_cases(Path(sys.argv[1]), train)
