"""One rank of a job: the video transformer under DSP and the real DeepSpeed, ZeRO 0 to 3."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

import wf_deepspeed
from tests.threads.test_video_dit import TWO, small, stages, train_video
from wf_backends.stages import LayoutTracker
from wf_backends.switch import DynamicSequenceParallel

STEPS = 4


def main(folder: Path) -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    with wf_deepspeed.without_shared_memory_op():
        deepspeed.init_distributed("gloo")
    losses = {stage: train(stage) for stage in range(4)}
    if dist.get_rank() == 0:
        (folder / "losses.json").write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


def train(stage: int) -> list[float]:
    """DeepSpeed takes the ranks for data parallel ones, and averages over them."""
    words = small(TWO, {"switch": True})
    config = train_video.VideoDiTConfig(**words["model"])
    model = train_video.initialise(train_video.VideoDiT(config), seed=0)
    dsp = DynamicSequenceParallel(gradients="averaged")
    LayoutTracker(model, dsp, stages(model, switch=True))
    engine, *_ = deepspeed.initialize(model=model, config=deepspeed_config(stage))
    losses = []
    for step in range(STEPS):
        batch = train_video.choose(config, None, step, words["training"])
        loss = train_video.flow_loss(engine, batch, step, torch.float32)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def deepspeed_config(stage: int) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.3}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 6000},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
