"""One rank of a job of test_accelerate.py: the Trainer, and users' own loops under accelerate.

python accelerate_worker.py FOLDER, with FOLDER/cases.json; rank 0 writes FOLDER/NAME.json. A case
has a "name", a "scenario" (of SCENARIOS, or one that `make_trainer` knows), the number of
"gradient_accumulation" steps, and the configuration "wallfacer", null for a job without it.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.local_sgd import LocalSGD
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from torch.nn.functional import cross_entropy
from transformers import (
    EvalPrediction,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)
from transformers.loss.loss_utils import ForCausalLMLoss

import wf_accelerate
from tests.helpers import destroy_groups
from tests.integrations.deepspeed_jobs import tiny_llama
from tests.integrations.deepspeed_trainer import (
    NUM_EVALUATED,
    STEPS,
    Samples,
    leave_job,
    training_arguments,
)
from wf_transformers.memory.checkpoints import inputs_on_host

Case = dict[str, Any]
Result = dict[str, Any]


class Stream(torch.utils.data.IterableDataset):
    """`Samples` without a length."""

    def __init__(self, num_samples: int) -> None:
        self._samples = Samples(num_samples)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self._samples[index] for index in range(len(self._samples)))


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """The number of samples that the Trainer gathered, and the accuracy of their valid labels."""
    logits, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    is_correct = (logits.argmax(-1) == labels)[labels != -100]
    return {"samples": len(labels), "accuracy": float(is_correct.mean())}


def loss_from_logits(
    output: Any, labels: torch.Tensor, num_items_in_batch: Any = None
) -> torch.Tensor:
    """A user's `compute_loss_func`: cross entropy over the Trainer's number of labels."""
    logits = output.logits[:, :-1].flatten(0, 1)
    total = cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    count = (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return total / count


def penalised_loss(logits: torch.Tensor, labels: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """A model's own `loss_function`: one term is not a mean over the labels."""
    is_valid = labels != -100  # logits at padding are defined on no number of ranks
    penalty = logits.logsumexp(-1).square()[is_valid].mean()
    return ForCausalLMLoss(logits, labels, *args, **kwargs) + penalty


def make_trainer(case: Case, folder: str, **options: Any) -> tuple[Trainer, Any]:
    """Return the scenario's Trainer, and its handle, None for a job without WallFacer."""
    scenario = case["scenario"]
    options["gradient_accumulation_steps"] = case["gradient_accumulation"]
    if scenario == "smoothed":  # averaging tokens, the Trainer scales this loss by the ranks, too
        options |= {"label_smoothing_factor": 0.1, "average_tokens_across_devices": False}
    if scenario == "recomputed":
        options |= {"gradient_checkpointing": True, "dataloader_num_workers": 2}
    if scenario == "compiled":
        options |= {"torch_compile": True, "torch_compile_backend": "eager"}
    is_seq2seq = scenario == "seq2seq"
    dataset = Stream if scenario == "stream" else Samples
    arguments_class = Seq2SeqTrainingArguments if is_seq2seq else TrainingArguments
    trainer = (Seq2SeqTrainer if is_seq2seq else Trainer)(
        tiny_llama(),
        training_arguments(folder, arguments_class, **options),
        train_dataset=dataset(32),
        eval_dataset=dataset(NUM_EVALUATED),
        compute_metrics=None if scenario == "stream" else compute_metrics,
        compute_loss_func=loss_from_logits if scenario == "own_loss" else None,
    )
    if scenario == "penalised":
        trainer.model.loss_function = penalised_loss  # type: ignore[union-attr]
    if scenario == "trainer_fsdp":
        use_fsdp2(trainer.accelerator)
        trainer.is_fsdp_enabled = True
    config = case["wallfacer"]
    return trainer, wf_accelerate.connect_trainer(trainer, config) if config else None


def train_evaluate_predict(case: Case, folder: str) -> Result:
    trainer, handle = make_trainer(case, folder)
    bytes_sent = []  # in training, evaluation and prediction, by label

    def record_bytes() -> None:
        if handle is not None:
            bytes_sent.append(handle.report())

    loss = trainer.train().training_loss
    record_bytes()
    recompute = getattr(trainer.model.model, "_gradient_checkpointing_func", None)
    evaluation = trainer.evaluate()
    record_bytes()
    prediction: Any = trainer.predict(trainer.eval_dataset)  # type: ignore[arg-type]
    record_bytes()
    return {
        "loss": loss,
        "offloads": getattr(recompute, "func", None) is inputs_on_host,
        "steps": losses_and_norms(trainer),
        "total_flos": trainer.state.total_flos,
        "eval": evaluation,
        "bytes_sent": bytes_sent,
        "logits": np.asarray(prediction.predictions).tolist(),
        "labels": np.asarray(prediction.label_ids).tolist(),
    }


def resume(case: Case, folder: str) -> Result:
    """Train half of the steps with one Trainer, and the others with another from its checkpoint."""
    half = STEPS // 2
    make_trainer(case, folder, save_strategy="steps", save_steps=half)[0].train()
    trainer, _ = make_trainer(case, folder)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{half}")
    return {"steps": losses_and_norms(trainer), "eval": trainer.evaluate()}


def losses_and_norms(trainer: Trainer) -> list[list[float]]:
    """The loss and the gradient norm of each step, as logged."""
    return [[step["loss"], float(step["grad_norm"])] for step in trainer.state.log_history[:STEPS]]


def use_fsdp2(accelerator: Accelerator) -> None:
    """Do what `Accelerator(fsdp_plugin=...)` does on GPUs; on a CPU it ignores the plugin."""
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    accelerator.state.distributed_type = DistributedType.FSDP


def train_in_a_loop(case: Case, folder: str) -> Result:
    """Train in a user's own loop, in float64, under accelerate's DDP or FSDP2."""
    accelerator = Accelerator(cpu=True)
    if case["scenario"] == "fsdp":
        use_fsdp2(accelerator)
    model = tiny_llama().double()
    if case["wallfacer"]:
        handle = wf_accelerate.connect(model, accelerator, case["wallfacer"])
        model.gradient_checkpointing_enable(handle.checkpoint_kwargs)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prepared_model, optimizer = accelerator.prepare(model, optimizer)
    loader = accelerator.prepare(torch.utils.data.DataLoader(Samples(6), batch_size=1))
    steps, num_labels = [], []
    for batch in loader:
        loss = prepared_model(**batch).loss
        accelerator.backward(loss)
        norm: Any = accelerator.clip_grad_norm_(prepared_model.parameters(), 1.0)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        optimizer.zero_grad()
        steps.append([float(accelerator.gather(loss.detach()).mean()), float(norm)])
        valid = int((batch["labels"] != -100).sum())
        num_labels += accelerator.gather_for_metrics([valid], use_gather_object=True)
    result: Result = {"steps": steps, "num_labels": num_labels}
    if case["scenario"] == "ddp":
        result["refused"] = refused_steps(accelerator, prepared_model, optimizer, batch)
    return result


def refused_steps(accelerator: Any, model: Any, optimizer: Any, batch: Any) -> list[str]:
    """The errors of steps that would use gradients of one rank."""

    def local_sgd() -> None:
        with LocalSGD(accelerator, model, local_sgd_steps=2):
            optimizer.step()

    def in_the_backward() -> None:
        parameter = next(model.parameters())
        sgd = torch.optim.SGD([parameter])
        hook = parameter.register_post_accumulate_grad_hook(lambda _: sgd.step())
        try:
            accelerator.backward(model(**batch).loss)
        finally:
            hook.remove()

    def lomo() -> None:  # lomo-optim need not be installed: accelerate sets this when it prepares
        accelerator.has_lomo_optimizer = True
        try:
            model(**batch)
        finally:
            accelerator.has_lomo_optimizer = False

    errors = []
    for step in (local_sgd, lomo, in_the_backward):
        try:
            step()
        except NotImplementedError as error:
            errors.append(str(error))
    return errors


SCENARIOS = {"ddp": train_in_a_loop, "fsdp": train_in_a_loop, "resumed": resume}
"""The others use `train_evaluate_predict`."""


def run_scenario(case: Case, folder: str) -> Result:
    return SCENARIOS.get(case["scenario"], train_evaluate_predict)(case, folder)


def run_cases(folder: Path, run: Callable[[Case, str], Result]) -> None:
    """Run every case of FOLDER/cases.json; rank 0 writes FOLDER/NAME.json."""
    for case in json.loads((folder / "cases.json").read_text()):
        AcceleratorState._reset_state(False)
        GradientState._reset_state()
        result = run(case, str(folder / "trainer"))
        if AcceleratorState().is_main_process:
            (folder / f"{case['name']}.json").write_text(json.dumps(result))
        if dist.is_initialized():
            destroy_groups()
    leave_job()


if __name__ == "__main__":
    run_cases(Path(sys.argv[1]), run_scenario)
