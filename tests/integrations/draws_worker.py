"""The dropout masks of three forwards on each rank, the last one of the model inside, and what the
rank draws after them, as JSON.

python draws_worker.py OUT.json
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

import wf_transformers
from wf_backends import SequenceParallel, SequenceParallelConfig, launch


def main() -> None:
    launch.init()
    sp = SequenceParallel(SequenceParallelConfig.from_dict({"sequence_parallel_size": 2}))
    torch.manual_seed(0)
    sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 1, "n_head": 2}
    dropout = {"embd_pdrop": 0.5, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout))
    wf_transformers.attach(model, sp, verify=False)  # comparisons would call dropout, too
    masks: list[torch.Tensor] = []
    model.transformer.drop.register_forward_hook(lambda _, __, out: masks.append(out != 0))
    local = sp.shard_batch({"input_ids": torch.zeros(1, 64, dtype=torch.int64)})
    for called in (model, model, model.transformer):
        called(**wf_transformers.forward_kwargs(model, local))
    draws = [mask.flatten().tolist() for mask in masks] + [torch.rand(8).tolist()]
    draws_by_rank: list[list[list[float]]] = [[] for _ in range(2)]
    dist.all_gather_object(draws_by_rank, draws)
    if sp.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(draws_by_rank))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
