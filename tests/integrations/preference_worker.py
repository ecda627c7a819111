"""One rank of a job of test_preferences.py: TRL's DPO, KTO, GRPO, RLOO and reward trainers.

python preference_worker.py FOLDER, with FOLDER/cases.json; rank 0 writes FOLDER/NAME.json. A case
has a "name", its "trainer" (of TRAINERS), the "options" of the trainer's configuration, and the
configuration "wallfacer", null for a job without it. Models are in float64.
"""

import sys
from collections.abc import Callable, Sequence
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
from tests.integrations.deepspeed_jobs import VOCABULARY, tiny_llama
from tests.integrations.trl_jobs import HAS_FUSED_HEAD, RELEASE

STEPS, SAMPLES = 3, 24
Options = dict[str, Any]


def make_tokenizer(padding_side: str = "right") -> Any:
    return trl_jobs.number_tokenizer(bos_token="t2", padding_side=padding_side)


def random_text(seed: int, length: int) -> str:
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (length,), generator=random).tolist()  # 0 to 2 are special
    return " ".join(f"t{n}" for n in ids)


def preferences() -> datasets.Dataset:
    """Prompts and answers of different lengths."""
    rows = [
        {
            "prompt": random_text(3 * n, 5 + n % 4 * 3),
            "chosen": " " + random_text(3 * n + 1, 18 - n % 3 * 5),
            "rejected": " " + random_text(3 * n + 2, 9 + n % 5 * 4),
        }
        for n in range(SAMPLES)
    ]
    return datasets.Dataset.from_list(rows)


def reward_model() -> LlamaForSequenceClassification:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, num_labels=1, pad_token_id=0, **shape, **heads)
    return LlamaForSequenceClassification(config)


def tokenized(rows: datasets.Dataset) -> datasets.Dataset:
    """The columns that TRL 0.19's RewardTrainer takes."""
    tokenizer = make_tokenizer()

    def tokenize(row: dict[str, str]) -> dict[str, Any]:
        columns = {}
        for answer in ("chosen", "rejected"):
            tokens = tokenizer(row["prompt"] + row[answer])
            columns[f"input_ids_{answer}"] = tokens["input_ids"]
            columns[f"attention_mask_{answer}"] = tokens["attention_mask"]
        return columns

    return rows.map(tokenize)


def reference_model(dtype: torch.dtype) -> Any:
    """A model with other weights than the one that is trained."""
    model = tiny_llama().to(dtype).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    return model


def dpo(arguments: Options, options: Options, dtype: torch.dtype = torch.float64) -> Any:
    return recording(DPOTrainer)(
        tiny_llama().to(dtype),
        reference_model(dtype),
        DPOConfig(**arguments, **options, disable_dropout=True),
        train_dataset=preferences(),
        eval_dataset=preferences().select(range(4)),
        processing_class=make_tokenizer(),
        compute_metrics=first_logits if HAS_FUSED_HEAD else None,
    )


def first_logits(evaluated: Any) -> dict[str, float]:
    """A metric of whole logits, without those of padding."""
    return {"first_logits": float(abs(evaluated.predictions[:, :5]).mean())}


def dpo_lora(arguments: Options, options: Options, dtype: torch.dtype = torch.float64) -> Any:
    """The reference is the model without its adapter."""
    adapter = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = tiny_llama().to(dtype)
    torch.manual_seed(0)  # the trainer draws the adapter's weights
    trainer = recording(DPOTrainer)(
        model,
        None,
        DPOConfig(**arguments, **options),
        peft_config=adapter,
        train_dataset=preferences(),
        processing_class=make_tokenizer(),
    )
    trainer.model.to(dtype)
    return trainer


def orpo(arguments: Options, options: Options, dtype: torch.dtype = torch.float64) -> Any:
    return without_reference("orpo", arguments, options, dtype)


def cpo(arguments: Options, options: Options, dtype: torch.dtype = torch.float64) -> Any:
    return without_reference("cpo", arguments, options, dtype)


def without_reference(name: str, arguments: Options, options: Options, dtype: torch.dtype) -> Any:
    trainer_class, config_class = trl_jobs.classes(name)
    lengths = trl_jobs.taken(config_class, max_length=64, max_prompt_length=32)
    return recording(trainer_class)(
        tiny_llama().to(dtype),
        config_class(**arguments, **options, **lengths),
        train_dataset=preferences(),
        processing_class=make_tokenizer(),
    )


def count_descents(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """A reward of completions: how often a token is below the one before."""
    return [float(sum(a > b for a, b in zip(ids, ids[1:], strict=False))) for ids in completion_ids]


def grpo(arguments: Options, options: Options, dtype: torch.dtype = torch.float64) -> Any:
    return policy_trainer(GRPOTrainer, GRPOConfig, arguments, options, dtype)


def rloo(arguments: Options, options: Options, dtype: torch.dtype = torch.float64) -> Any:
    return policy_trainer(trl.RLOOTrainer, trl.RLOOConfig, arguments, options, dtype)


def policy_trainer(
    trainer_class: type,
    config_class: type,
    arguments: Options,
    options: Options,
    dtype: torch.dtype,
) -> Any:
    lengths = trl_jobs.taken(config_class, max_completion_length=20, max_prompt_length=16)
    config = config_class(**arguments, **options, **lengths)  # it starts the job: before its state
    policy, folder, job = (
        tiny_llama().to(dtype),
        f"{arguments['output_dir']}-policy",
        PartialState(),
    )
    if job.is_main_process:
        policy.save_pretrained(folder)  # TRL loads its reference from there
    job.wait_for_everyone()
    policy.config._name_or_path = folder
    trainer = recording(trainer_class)(
        policy,
        count_descents,
        config,
        train_dataset=preferences().remove_columns(["chosen", "rejected"]),
        processing_class=make_tokenizer("left"),
    )
    if trainer.ref_model is not None:
        trainer.ref_model.to(dtype)
    return trainer


def reward(arguments: Options, options: Options, dtype: torch.dtype = torch.float64) -> Any:
    return recording(RewardTrainer)(
        reward_model().to(dtype),
        RewardConfig(**arguments, **options, max_length=64),
        train_dataset=preferences() if RELEASE >= (0, 24) else tokenized(preferences()),
        processing_class=make_tokenizer(),
    )


def kto(arguments: Options, options: Options, dtype: torch.dtype = torch.float64) -> Any:
    rows = [
        {"prompt": row["prompt"], "completion": row[answer], "label": answer == "chosen"}
        for row in preferences()
        for answer in ("chosen", "rejected")
    ]
    trainer_class, config_class = trl_jobs.classes("kto")
    return recording(trainer_class)(
        tiny_llama().to(dtype),
        reference_model(dtype),
        config_class(**arguments, **options),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=make_tokenizer(),
    )


def sft(arguments: Options, options: Options, dtype: torch.dtype = torch.float64) -> Any:
    return recording(trl.SFTTrainer)(
        tiny_llama().to(dtype),
        trl.SFTConfig(**arguments, **options),
        train_dataset=preferences()
        .remove_columns("rejected")
        .rename_column("chosen", "completion"),
        processing_class=make_tokenizer(),
    )


TRAINERS: dict[str, Callable[..., Any]] = {
    "sft": sft,
    "dpo": dpo,
    "dpo_lora": dpo_lora,
    "orpo": orpo,
    "cpo": cpo,
    "grpo": grpo,
    "rloo": rloo,
    "kto": kto,
    "reward": reward,
}


def recording(trainer_class: type) -> type:
    """A subclass that keeps its losses as they are; the log rounds them."""

    class Recording(trainer_class):  # type: ignore[misc]
        losses: list[float]

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            self.losses = [*getattr(self, "losses", []), float(loss)]
            return loss

    return Recording


def train(case: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return the losses of the steps, the change of the parameters, and the evaluation metrics."""
    arguments = {
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
        # since TRL 0.20 layers are recomputed, by default in a way that DDP refuses with adapters
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    }
    trainer = TRAINERS[case["trainer"]](arguments, case["options"])
    initial = flat_parameters(trainer.model)
    config = case["wallfacer"]
    handle = wf_accelerate.connect_trainer(trainer, config) if config else None
    trainer.train()
    if trainer.eval_dataset is not None:
        trainer.evaluate()  # of TRL 0.29 returns the loss alone, and logs the others
    return {
        "losses": trainer.losses,
        "parameter_change": (flat_parameters(trainer.model) - initial).tolist(),
        "eval": without_times(trainer.state.log_history[-1]),
        "bytes_sent": handle.report() if handle else {},
    }


def flat_parameters(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def without_times(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that do not depend on how fast the job was."""
    return {
        key: value
        for key, value in metrics.items()
        if not any(word in key for word in ("time", "second"))
    }


if __name__ == "__main__":
    run_cases(Path(sys.argv[1]), train)
