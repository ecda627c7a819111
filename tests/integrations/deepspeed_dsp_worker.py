"""One rank of a job: the video transformer under the real DeepSpeed, with "dsp" in its JSON.

python deepspeed_dsp_worker.py FOLDER, with FOLDER/cases.json; rank 0 writes FOLDER/results.json.
A case has a "name", the "stages" of the model, the stage of "zero", the steps of "accumulation",
and the "block" of WallFacer, None for a job without it.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F

import wf_deepspeed
from tests.dsp.video import small_video, train_video

STEPS = 4


def main(folder: Path) -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    with wf_deepspeed.without_shared_memory_op():
        deepspeed.init_distributed("gloo")
    cases = json.loads((folder / "cases.json").read_text())
    results = {case["name"]: train(case) for case in cases}
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Return the mean loss of all samples of each step, and what the handle did."""
    example = small_video(case["stages"], {}, frames=4, width=32)
    config = train_video.VideoDiTConfig(**example["model"])
    model = train_video.initialise(train_video.VideoDiT(config), seed=0)
    engine = initialize(case, model)
    handle = getattr(engine, "wallfacer", None)
    group, num_groups = (handle.data_parallel_rank, handle.data_parallel_size) if handle else (0, 1)
    losses = []
    for step in range(STEPS):
        step_loss = torch.zeros(())
        for micro_step in range(case["accumulation"]):
            sample = (step * case["accumulation"] + micro_step) * num_groups + group
            batch = train_video.make_batch(config, None, sample, example["training"])
            loss = train_video.flow_loss(engine, batch, sample, torch.float32)
            engine.backward(loss)
            engine.step()
            step_loss += loss.detach() / case["accumulation"]
        losses.append(float(handle.mean(step_loss) if handle else step_loss))
    result: dict[str, Any] = {"losses": losses}
    if handle:
        result |= use_handle(handle)
        handle.remove()
    modules = (engine.module.blocks[0], engine.module.final)
    result["hooks_after_remove"] = sum(len(module._forward_pre_hooks) for module in modules)
    engine.destroy()
    return result


def initialize(case: dict[str, Any], model: torch.nn.Module) -> Any:
    """Return the engine; the case "unmodified" calls DeepSpeed's function, as a script may."""
    arguments: dict[str, Any] = {"model": model, "config": deepspeed_config(case)}
    if case["name"] == "unmodified":
        with wf_deepspeed.opened():
            return deepspeed.initialize(**arguments)[0]
    return wf_deepspeed.initialize(**arguments)[0]


def use_handle(handle: wf_deepspeed.WallFacer) -> dict[str, Any]:
    """Report the bytes sent, then call the handle with whole batches and logits."""
    bytes_sent = handle.report()
    labels = torch.tensor([[1, 2, -100, 0]])
    logits = torch.randn(1, 4, 5, generator=torch.Generator().manual_seed(0))
    expected = F.cross_entropy(logits[0], labels[0])
    batch_is_whole = torch.equal(handle.shard_batch({"video": logits})["video"], logits)
    try:
        handle.shard_batch({"video": logits + dist.get_rank()})
        different_batches_error = ""
    except ValueError as error:
        different_batches_error = "\n".join([str(error), *error.__notes__])
    return {
        "bytes_sent": bytes_sent,
        "batch_is_whole": batch_is_whole,
        "different_batches_error": different_batches_error,
        "loss_error": float((handle.loss(logits, labels) - expected).abs()),
    }


def deepspeed_config(case: dict[str, Any]) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case["accumulation"],
        "optimizer": {"type": "SGD", "params": {"lr": 0.3}},
        "zero_optimization": {"stage": case["zero"], "reduce_bucket_size": 6000},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    return config | ({"wallfacer": case["block"]} if case["block"] else {})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
