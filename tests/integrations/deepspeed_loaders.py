"""One rank of 4, two for each sequence: the samples of the loaders, and the errors of wrong calls.

python deepspeed_loaders.py OUT writes OUT.RANK.json.
"""

import json
import sys
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import Dataset

import wf_accelerate
import wf_deepspeed
from tests.integrations.deepspeed_jobs import tiny_llama
from wf_backends.comm.process_group import timeout_of
from wf_deepspeed.mpu import Groups

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    "wallfacer": {"sequence_parallel_size": 2, "route": "ring", "loss_average": "token"},
}


class Numbered(Dataset[Any]):
    """Sample n repeats the token n 8 times; its first 2 + n % 4 labels are valid."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.full((8,), index)
        labels = torch.where(torch.arange(8) < 2 + index % 4, ids, -100)
        return {"input_ids": ids, "labels": labels}


def main(out: str) -> None:
    torch.set_num_threads(1)
    with wf_deepspeed.without_shared_memory_op():
        deepspeed.init_distributed("gloo")
    model, data = tiny_llama(), Numbered()
    engine, _, loader, _ = wf_deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=data, config=dict(CONFIG)
    )
    wallfacer = engine.wallfacer
    result: dict[str, Any] = {
        "data_parallel": [wallfacer.data_parallel_rank, wallfacer.data_parallel_size],
        "deepspeed_loader": [sample_numbers(batch) for batch in loader],
    }
    batches = list(wallfacer.dataloader(data, 2, shuffle=True, seed=1))
    result["wallfacer_loader"] = [sample_numbers(batch) for batch in batches]
    result["local_seqlen"] = batches[0]["input_ids"].shape[1]
    result["local_labels"] = [num_valid(batch) for batch in batches]
    result["valid_labels"] = [batch["valid_labels"] for batch in batches]
    shifted = wallfacer.dataloader(data, 2, labels_are_shifted=True)
    result["shifted_labels"] = num_valid(next(iter(shifted)))
    world, groups = dist.group.WORLD, Groups.build(4)
    assert world is not None
    result["sequence_group_is_separate"] = groups.sequence is not world
    result["timeouts_equal_the_world"] = [
        timeout_of(group) == timeout_of(world) for group in (groups.sequence, groups.alone)
    ]
    result["different_batches_error"] = different_batches_error(wallfacer)
    result["missing_count_error"] = missing_count_error(wallfacer)
    result["different_sizes_errors"] = different_sizes_errors()
    engine.set_train_batch_size(16)
    result["accumulation_of_16_samples"] = engine.gradient_accumulation_steps()
    plain, keys = tiny_llama(), {key: CONFIG[key] for key in CONFIG if key != "wallfacer"}
    later, *_ = deepspeed.initialize(model=plain, model_parameters=plain.parameters(), config=keys)
    later.set_train_batch_size(16)
    result["accumulation_of_a_later_engine"] = later.gradient_accumulation_steps()
    with open(f"{out}.{dist.get_rank()}.json", "w") as file:
        json.dump(result, file)
    dist.barrier()
    dist.destroy_process_group()


def sample_numbers(batch: dict[str, Any]) -> list[int]:
    return batch["input_ids"][:, 0].tolist()


def num_valid(batch: dict[str, Any]) -> int:
    return int((batch["labels"] != -100).sum())


def different_batches_error(wallfacer: wf_deepspeed.WallFacer) -> str:
    """The error of `shard_batch` if every rank has another batch."""
    try:
        wallfacer.shard_batch({"input_ids": torch.full((1, 8), dist.get_rank())})
    except ValueError as error:
        return "\n".join([str(error), *error.__notes__])
    return "no error"


def missing_count_error(wallfacer: wf_deepspeed.WallFacer) -> str:
    """The error of `loss` without the number of valid labels of the step."""
    try:
        wallfacer.loss(torch.zeros(1, 4, 32), torch.zeros(1, 4, dtype=torch.int64))
    except ValueError as error:
        return str(error)
    return "no error"


def different_sizes_errors() -> dict[str, str]:
    """The error of each entry if rank 3 has sequence_parallel_size 4, and the others 2."""
    model, block = tiny_llama(), {"sequence_parallel_size": 4 if dist.get_rank() == 3 else 2}
    parameters, config = model.parameters(), CONFIG | {"wallfacer": block}
    calls = {
        "deepspeed": partial(wf_deepspeed.initialize, None, model, None, parameters, config=config),
        "accelerate": partial(wf_accelerate.connect, model, Accelerator(cpu=True), block),
    }
    errors = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            errors[name] = str(error)
    return errors


if __name__ == "__main__":
    main(sys.argv[1])
