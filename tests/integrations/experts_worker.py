"""A rank of a job that trains a mixture of experts with its routers' loss: DDP, FSDP2, ZeRO.

python experts_worker.py FOLDER ENGINE: one step of two groups of ranks, each with a batch of its
own; the first rank writes the loss of its batch and all weights after the step.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import wf_deepspeed
import wf_transformers
from tests.integrations.families import FAMILIES, batch, build
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.parallel.loss import count_valid

RATE = 0.5
WORDS = {"sequence_parallel_size": 2, "route": {"name": "ring"}}
MORE = {"router_aux_loss_coef": 0.3, "output_router_logits": True}


def mixture(name: str) -> Any:
    return build(FAMILIES[name], **MORE).float()


def padded(group: int) -> dict[str, Any]:
    """Of two samples the second has padding, another number of tokens in each group."""
    found, ends = batch(), torch.tensor([[23], [9 + 5 * group]])
    mask = (torch.arange(23)[None] < ends).long()
    ids = (found["input_ids"] * (group + 2)) % 50 + 5
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def by_torch(name: str, engine: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The model takes whole batches; gradients are averaged over all ranks."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = dist.get_rank() // 2
    model = mixture(name)
    sp = SequenceParallel(SequenceParallelConfig.from_dict(WORDS), groups[group])
    handle = wf_transformers.attach(model, sp, verify=False)
    wf_transformers.WholeBatchHooks(model, handle)
    wrapped: nn.Module = model
    if engine == "ddp":
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=RATE)
    loss = wrapped(**padded(group)).loss
    loss.backward()
    optimizer.step()
    whole = {key: getattr(p, "full_tensor", lambda p=p: p)() for key, p in model.named_parameters()}
    return float(loss.detach()), whole


def by_deepspeed(name: str, stage: int) -> tuple[float, dict[str, torch.Tensor]]:
    from deepspeed.runtime.zero import GatheredParameters

    model = mixture(name)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "gradient_clipping": 1e9,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "wallfacer": {"enabled": True, "verify": False, **WORDS},
    }
    engine, *_ = wf_deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    ours = engine.wallfacer
    local = ours.shard_batch(padded(ours.data_parallel_rank))
    num_valid = ours.sp.sum_over_ranks(count_valid(local["labels"]))
    loss = engine(**wf_transformers.forward_kwargs(engine, local, num_valid=num_valid)).loss
    engine.backward(loss * ours.sp.size)
    engine.step()
    with GatheredParameters(list(model.parameters())):
        whole = {key: p.detach().clone() for key, p in model.named_parameters()}
    return float(ours.sp.sum_over_ranks(loss.detach())), whole


def main(folder: Path, name: str, engine: str) -> None:
    torch.set_num_threads(1)
    if engine.startswith("zero"):
        import deepspeed

        with wf_deepspeed.without_shared_memory_op():
            deepspeed.init_distributed("gloo")
        loss, weights = by_deepspeed(name, int(engine[-1]))
    else:
        dist.init_process_group("gloo")
        loss, weights = by_torch(name, engine)
    if dist.get_rank() == 0:
        torch.save({"loss": loss, "weights": weights}, folder / f"{name}_{engine}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:4])
