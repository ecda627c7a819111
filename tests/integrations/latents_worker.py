"""One training step of DeepSeek-V3 under DeepSpeed, with "latents": true in the JSON.

python latents_worker.py FOLDER STAGE: the first rank writes the weights after the step and the
bytes that its attention sent.
"""

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import GatheredParameters

import wf_deepspeed
import wf_transformers
from tests.integrations.families import FAMILIES, batch, build

LEARNING_RATE = 0.5


def build_without_experts() -> Any:
    """ZeRO 3 would gather an expert's weights only on the ranks that have tokens for it."""
    return build(FAMILIES["deepseek_v3"], first_k_dense_replace=2).float()


def json_config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE}},
        "gradient_clipping": 1e9,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "wallfacer": {
            "sequence_parallel_size": 2,
            "route": {"name": "ring"},
            "latents": True,
            "verify": "strict",
        },
    }


def main(folder: Path, stage: int) -> None:
    torch.set_num_threads(1)
    with wf_deepspeed.without_shared_memory_op():
        deepspeed.init_distributed("gloo")
    model = build_without_experts()
    engine, *_ = wf_deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=json_config(stage)
    )
    handle = engine.wallfacer
    local = handle.shard_batch(batch())
    handle.report()
    logits = engine(**wf_transformers.forward_kwargs(engine, local)).logits
    engine.backward(handle.loss(logits, local["labels"]))
    sent = {k: n for k, n in handle.report().items() if k.startswith("forward")}
    engine.step()
    with GatheredParameters(list(model.parameters())):
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save({"weights": weights, "sent": sent}, folder / "step.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
