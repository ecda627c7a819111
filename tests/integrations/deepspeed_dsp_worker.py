"""One rank of a job: the video transformer under the real DeepSpeed, with "dsp" in its JSON.

A case: name, model (stages), zero, block (or None), steps of accumulation.
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
from tests.dsp.test_video_dit import small, train_video

STEPS = 4


def main(folder: Path) -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    with wf_deepspeed.without_shared_memory_op():
        deepspeed.init_distributed("gloo")
    cases = json.loads((folder / "cases.json").read_text())
    found = {case["name"]: train(case) for case in cases}
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Losses of all samples of a step, and what the component says."""
    words = small(case["stages"], {}, frames=4, width=32)
    config = train_video.VideoDiTConfig(**words["model"])
    model = train_video.initialise(train_video.VideoDiT(config), seed=0)
    engine, *_ = start(case)(model=model, config=deepspeed_config(case))
    component = getattr(engine, "wallfacer", None)
    part, parts = (
        (component.data_parallel_rank, component.data_parallel_size) if component else (0, 1)
    )
    losses = []
    for step in range(STEPS):
        total = torch.zeros(())
        for micro in range(case["accumulation"]):
            sample = (step * case["accumulation"] + micro) * parts + part
            batch = train_video.make_batch(config, None, sample, words["training"])
            loss = train_video.flow_loss(engine, batch, sample, torch.float32)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / case["accumulation"]
        losses.append(float(component.mean(total) if component else total))
    found: dict[str, Any] = {"losses": losses}
    if component:
        found |= told(component)
        component.remove()
    hooks = (len(m._forward_pre_hooks) for m in (engine.module.blocks[0], engine.module.final))
    found["hooks"] = sum(hooks) if case["zero"] < 3 else 0  # ZeRO 3 has hooks of its own
    engine.destroy()
    return found


def start(case: dict[str, Any]) -> Any:
    """What starts DeepSpeed: our function, or in a script that knows nothing of it, theirs."""
    if case["name"] != "unmodified":
        return wf_deepspeed.initialize

    def initialize(**arguments: Any) -> Any:
        with wf_deepspeed.opened():
            return deepspeed.initialize(**arguments)

    return initialize


def told(component: wf_deepspeed.WallFacer) -> dict[str, Any]:
    """Bytes; its loss of whole logits; what it does with batches that differ in a group."""
    labels = torch.tensor([[1, 2, -100, 0]])
    logits = torch.randn(1, 4, 5, generator=torch.Generator().manual_seed(0))
    right = F.cross_entropy(logits[0], labels[0])
    same = component.shard_batch({"video": logits})
    try:
        component.shard_batch({"video": logits + dist.get_rank()})
        refused = ""
    except ValueError as error:
        refused = "\n".join([str(error), *error.__notes__])
    whole = torch.equal(same["video"], logits)
    error = float((component.loss(logits, labels) - right).abs())
    return {"sent": component.report(), "whole": whole, "refused": refused, "loss_error": error}


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
