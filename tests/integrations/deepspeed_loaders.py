"""One of 4 ranks, two a sequence: what loaders yield, what a wrong batch does. OUT.RANK.json."""

import json
import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

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
    """Sample n is a sequence of the number n."""

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
        "theirs": [batch["input_ids"][:, 0].tolist() for batch in loader],
    }
    batches = list(wallfacer.dataloader(data, 2, shuffle=True, seed=1))
    result["ours"] = [batch["input_ids"][:, 0].tolist() for batch in batches]
    result["rows"] = batches[0]["input_ids"].shape[1]
    unshifted = next(iter(wallfacer.dataloader(data, 2, labels_are_shifted=True)))
    result["unshifted"] = int((unshifted["labels"] != -100).sum())
    result["valid"] = [batch["valid_labels"] for batch in batches]
    result["labels"] = [int((batch["labels"] != -100).sum()) for batch in batches]
    world, groups = dist.group.WORLD, Groups.build(4)
    assert world is not None
    result["own"] = groups.sequence is not world
    result["timeouts"] = [
        timeout_of(g) == timeout_of(world) for g in (groups.sequence, groups.alone)
    ]
    result["errors"] = [error(wallfacer, dist.get_rank()), missing(wallfacer)]
    with open(f"{out}.{dist.get_rank()}.json", "w") as file:
        json.dump(result, file)
    dist.barrier()
    dist.destroy_process_group()


def error(wallfacer: wf_deepspeed.WallFacer, rank: int) -> str:
    """What every rank is told if data was sharded by rank."""
    try:
        wallfacer.shard_batch({"input_ids": torch.full((1, 8), rank)})
    except ValueError as problem:
        return "\n".join([str(problem), *problem.__notes__])
    return "nothing"


def missing(wallfacer: wf_deepspeed.WallFacer) -> str:
    """What a loss without the step's count is told."""
    try:
        wallfacer.loss(torch.zeros(1, 4, 32), torch.zeros(1, 4, dtype=torch.int64))
    except ValueError as problem:
        return str(problem)
    return "nothing"


if __name__ == "__main__":
    main(sys.argv[1])
