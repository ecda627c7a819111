"""A rank of a job of DeepSpeed whose JSON says "latents": one step of a DeepSeek-V3, verified.

python latents_worker.py FOLDER STAGE: the first rank writes the weights after the step, and the
bytes that attention sent.
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

RATE = 0.5


def dense() -> Any:
    """Without experts, which ZeRO 3 would gather on the ranks that have tokens for them only."""
    return build(FAMILIES["deepseek_v3"], first_k_dense_replace=2).float()


def main(folder: Path, stage: int) -> None:
    torch.set_num_threads(1)
    with wf_deepspeed.without_shared_memory_op():
        deepspeed.init_distributed("gloo")
    model = dense()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "gradient_clipping": 1e9,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "wallfacer": {"sequence_parallel_size": 2, "route": {"name": "ring"}, "latents": True},
    }
    config["wallfacer"] |= {"verify": "strict"}
    engine, *_ = wf_deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    ours = engine.wallfacer
    local = ours.shard_batch(batch())
    ours.sp.report()
    logits = engine(**wf_transformers.forward_kwargs(engine, local)).logits
    engine.backward(ours.loss(logits, local["labels"]))
    sent = {k: n for k, n in ours.sp.report().items() if k.startswith("forward")}
    engine.step()
    with GatheredParameters(list(model.parameters())):
        weights = {key: p.detach().clone() for key, p in model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save({"weights": weights, "sent": sent}, folder / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
