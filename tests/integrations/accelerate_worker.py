"""What the tests of wf_accelerate run on every rank: the Trainer, and loops of accelerate's.

python accelerate_worker.py FOLDER, with FOLDER/cases.json: a list of cases. A case has a "name", a
"kind" (below), a "gradient_accumulation", and the "words" of WallFacer, none for a job without us.
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
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from torch.nn.functional import cross_entropy
from transformers import EvalPrediction, Trainer
from transformers.loss.loss_utils import ForCausalLMLoss

import wf_accelerate
from tests.helpers import destroy_groups
from tests.integrations.deepspeed_trainer import Text, arguments, leave, model
from wf_transformers.checkpoints import inputs_on_host

Result = dict[str, Any]


class Stream(torch.utils.data.IterableDataset):
    """`Text` without a length."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        text = Text(32)
        return (text[index] for index in range(len(text)))


def metrics(found: EvalPrediction) -> dict[str, float]:
    """Of the samples that the Trainer gathered."""
    logits, labels = found.predictions[:, :-1], found.label_ids[:, 1:]
    right = (logits.argmax(-1) == labels)[labels != -100]
    return {"samples": len(labels), "accuracy": float(right.mean())}


def summed(output: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss of a user's own, from the logits, by the Trainer's count of labels."""
    logits = output.logits[:, :-1].flatten(0, 1)
    total = cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    count = (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return total / count


def penalised(logits: torch.Tensor, labels: torch.Tensor, *args: Any, **words: Any) -> Any:
    """A loss of the model's own, of which one term is no mean over the labels."""
    penalty = logits.logsumexp(-1).square()[labels != -100].mean()  # at padding none is right
    return ForCausalLMLoss(logits, labels, *args, **words) + penalty


def trainer_of(case: Result, folder: str, **more: Any) -> tuple[Trainer, Any]:
    """A Trainer, and what `connect_trainer` gave."""
    more["gradient_accumulation_steps"] = case["gradient_accumulation"]
    if case["kind"] == "smoothed":  # the Trainer multiplies that by the number of ranks, too
        more |= {"label_smoothing_factor": 0.1, "average_tokens_across_devices": False}
    if case["kind"] == "recomputed":
        more |= {"gradient_checkpointing": True, "dataloader_num_workers": 2}
    if case["kind"] == "compiled":
        more |= {"torch_compile": True, "torch_compile_backend": "eager"}
    trainer = Trainer(
        model(),
        arguments(folder, **more),
        train_dataset=Stream() if case["kind"] == "stream" else Text(32),
        eval_dataset=Text(7),  # two groups' last batch lacks a sample
        compute_metrics=None if case["kind"] == "stream" else metrics,
        compute_loss_func=summed if case["kind"] == "own_loss" else None,
    )
    if case["kind"] == "penalised":
        trainer.model.loss_function = penalised  # type: ignore[union-attr]
    if case["kind"] == "trainer_fsdp":
        use_fsdp2(trainer.accelerator)
        trainer.is_fsdp_enabled = True
    words = case["words"]
    return trainer, wf_accelerate.connect_trainer(trainer, words) if words else None


def train(case: Result, folder: str) -> Result:
    """The Trainer: training, evaluation, prediction."""
    trainer, connected = trainer_of(case, folder)
    loss = trainer.train().training_loss
    recompute = getattr(trainer.model.model, "_gradient_checkpointing_func", None)
    sent = [connected.report()] if connected else []
    evaluated = trainer.evaluate()
    sent += [connected.report()] if connected else []
    predicted: Any = trainer.predict(Text(7))
    sent += [connected.report()] if connected else []
    return {
        "loss": loss,
        "offloads": getattr(recompute, "func", None) is inputs_on_host,
        "steps": steps_of(trainer),
        "total_flos": trainer.state.total_flos,
        "eval": evaluated,
        "sent": sent,
        "logits": np.asarray(predicted.predictions).tolist(),
        "labels": np.asarray(predicted.label_ids).tolist(),
    }


def resume(case: Result, folder: str) -> Result:
    """The Trainer's six steps, the last three of another one from a checkpoint."""
    trainer_of(case, folder, save_strategy="steps", save_steps=3)[0].train()
    trainer, _ = trainer_of(case, folder)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    return {"steps": steps_of(trainer), "eval": trainer.evaluate()}


def steps_of(trainer: Trainer) -> list[list[float]]:
    return [[one["loss"], float(one["grad_norm"])] for one in trainer.state.log_history[:6]]


def use_fsdp2(accelerator: Accelerator) -> None:
    """What `Accelerator(fsdp_plugin=...)` does on GPUs; on a CPU it takes no notice of it."""
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    accelerator.state.distributed_type = DistributedType.FSDP


def loop(case: Result, folder: str) -> Result:
    """A loop of one's own, under accelerate's DDP or FSDP2."""
    accelerator = Accelerator(cpu=True)
    if case["kind"] == "fsdp":
        use_fsdp2(accelerator)
    llama = model().double()
    if case["words"]:
        connected = wf_accelerate.connect(llama, accelerator, case["words"])
        llama.gradient_checkpointing_enable(connected.checkpoint_kwargs)
    optimizer: Any = torch.optim.AdamW(llama.parameters(), lr=1e-3)
    trained, optimizer = accelerator.prepare(llama, optimizer)
    loader = accelerator.prepare(torch.utils.data.DataLoader(Text(10), batch_size=1))
    steps, lengths = [], []
    for batch in loader:
        loss = trained(**batch).loss
        accelerator.backward(loss)
        norm: Any = accelerator.clip_grad_norm_(trained.parameters(), 1.0)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        optimizer.zero_grad()
        steps.append([float(accelerator.gather(loss.detach()).mean()), float(norm)])
        valid = int((batch["labels"] != -100).sum())
        lengths += accelerator.gather_for_metrics([valid], use_gather_object=True)
    return {"steps": steps, "lengths": lengths}


KINDS = {"ddp": loop, "fsdp": loop, "resumed": resume}


def run_cases(folder: Path, run: Callable[[Result, str], Result]) -> None:
    """What the first rank found of every case, each in a file of its own."""
    for case in json.loads((folder / "cases.json").read_text()):
        AcceleratorState._reset_state(False)
        GradientState._reset_state()
        result = run(case, str(folder / "trainer"))
        if AcceleratorState().is_main_process:
            (folder / f"{case['name']}.json").write_text(json.dumps(result))
        if dist.is_initialized():
            destroy_groups()
    leave()


if __name__ == "__main__":
    run_cases(Path(sys.argv[1]), lambda case, folder: KINDS.get(case["kind"], train)(case, folder))
