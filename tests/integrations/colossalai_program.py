"""The program that tests of launchers start: one training step, every rank prints its loss.

python colossalai_program.py torch | openmpi PORT
"""

from __future__ import annotations

import sys
import warnings

import colossalai
import torch
import torch.distributed as dist
from colossalai.booster import Booster

import wf_colossalai
from tests.integrations.colossalai_models import batch, build


def main(launcher: str, port: str = "0") -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if launcher == "torch":
        colossalai.launch_from_torch()
    else:
        colossalai.launch_from_openmpi(host="127.0.0.1", port=int(port), backend="gloo")
    plugin = wf_colossalai.WallFacerPlugin(sequence_parallel_size=2, route="ring")
    model = build("llama")
    booster, optimizer = Booster(plugin=plugin), torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, *_ = booster.boost(model, optimizer)
    loss = model(**batch("llama", "plain", 0)).loss
    booster.backward(loss, optimizer)
    optimizer.step()
    line = f"rank {dist.get_rank()} of {dist.get_world_size()}: loss {loss.item():.6f}\n"
    print(line, end="", flush=True)  # in one write: lines of ranks stay whole
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
