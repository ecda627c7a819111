"""One rank of a job that trains a mixture of experts with its routers' loss: DDP, FSDP2, ZeRO.

python experts_worker.py FOLDER NAME ENGINE: one step of SGD on two groups of two ranks. Each group
has its own batch and shares its sequences. The first rank writes FOLDER/NAME_ENGINE.pt: the loss of
its group's batch, and all weights after the step.
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

LEARNING_RATE = 0.5
CONFIG = {"sequence_parallel_size": 2, "route": {"name": "ring"}}
ROUTER_LOSS = {"router_aux_loss_coef": 0.3, "output_router_logits": True}
Result = tuple[float, dict[str, torch.Tensor]]
"""The loss of the group's batch, and the weights after the step."""


def build_mixture(name: str) -> Any:
    return build(FAMILIES[name], **ROUTER_LOSS).float()


def padded_batch(group: int) -> dict[str, Any]:
    """Two sequences; the second one is padded, to another number of tokens in each group."""
    num_tokens = torch.tensor([[23], [9 + 5 * group]])
    mask = (torch.arange(23)[None] < num_tokens).long()
    ids = (batch()["input_ids"] * (group + 2)) % 50 + 5
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def step_of_torch(name: str, engine: str) -> Result:
    """The model takes whole batches; gradients are averaged over all ranks."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = dist.get_rank() // 2
    model = build_mixture(name)
    sp = SequenceParallel(SequenceParallelConfig.from_dict(CONFIG), groups[group])
    handle = wf_transformers.attach(model, sp, verify=False)
    wf_transformers.WholeBatchHooks(model, handle)
    wrapped: nn.Module = model
    if engine == "ddp":
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=LEARNING_RATE)
    loss = wrapped(**padded_batch(group)).loss
    loss.backward()
    optimizer.step()
    weights = {
        key: getattr(p, "full_tensor", lambda p=p: p)() for key, p in model.named_parameters()
    }
    return float(loss.detach()), weights


def step_of_deepspeed(name: str, stage: int) -> Result:
    """The batch is sharded in the training loop; a rank's loss is its share of a sum."""
    from deepspeed.runtime.zero import GatheredParameters

    model = build_mixture(name)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE}},
        "gradient_clipping": 1e9,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "wallfacer": {"enabled": True, "verify": False, **CONFIG},
    }
    engine, *_ = wf_deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    handle = engine.wallfacer
    shard = handle.shard_batch(padded_batch(handle.data_parallel_rank))
    num_valid = handle.sp.sum_over_ranks(count_valid(shard["labels"]))
    loss = engine(**wf_transformers.forward_kwargs(engine, shard, num_valid=num_valid)).loss
    engine.backward(loss * handle.sp.size)  # DeepSpeed averages over the ranks of a group, too
    engine.step()
    with GatheredParameters(list(model.parameters())):
        weights = {key: p.detach().clone() for key, p in model.named_parameters()}
    return float(handle.sp.sum_over_ranks(loss.detach())), weights


def main(folder: Path, name: str, engine: str) -> None:
    torch.set_num_threads(1)
    if engine.startswith("zero"):
        import deepspeed

        with wf_deepspeed.without_shared_memory_op():
            deepspeed.init_distributed("gloo")
        loss, weights = step_of_deepspeed(name, int(engine[-1]))
    else:
        dist.init_process_group("gloo")
        loss, weights = step_of_torch(name, engine)
    if dist.get_rank() == 0:
        torch.save({"loss": loss, "weights": weights}, folder / f"{name}_{engine}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:4])
