"""What every rank drops of one sequence, and whether ranks draw alike afterwards.

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
    words = {"n_embd": 8, "n_layer": 1, "n_head": 2, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=9, embd_pdrop=0.5, **words))
    wf_transformers.attach(model, sp)
    kept: list[torch.Tensor] = []
    model.transformer.drop.register_forward_hook(lambda _, __, out: kept.append(out != 0))
    local = sp.shard_batch({"input_ids": torch.zeros(1, 64, dtype=torch.int64)})
    for _ in range(2):
        model(**wf_transformers.forward_kwargs(model, local))
    found: list[list[list[bool]]] = [[] for _ in range(2)]
    mine = [x.flatten().tolist() for x in kept] + [(torch.rand(8) < 0.5).tolist()]
    dist.all_gather_object(found, mine)
    if sp.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
