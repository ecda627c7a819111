"""Exact attention over a sequence that no rank holds whole: the block of the README, compared.

torchrun --nproc-per-node 4 examples/attention.py
mpirun -n 4 python examples/attention.py
"""

import torch

from wf_backends import SequenceParallel, SequenceParallelConfig, launch

launch.init()  # torchrun, mpirun, srun, deepspeed
route = {"name": "concentric", "team_size": 2}  # or "ring", "all_gather", a mesh, "auto"
words = {"sequence_parallel_size": 4, "route": route, "layout": "zigzag", "ulysses_degree": 1}
sp = SequenceParallel(SequenceParallelConfig.from_dict(words))
torch.manual_seed(0)  # the whole is the same on every rank
q, k, v = (sp.shard(torch.randn(1, 4096, 8, 64), dim=1) for _ in range(3))  # this rank's rows
out = sp.attention(q, k, v, causal=True)  # exact, differentiable, this rank's rows
full = sp.unshard(out, dim=1)  # the whole, on every rank
print(sp.report())  # bytes sent, by hop

whole = (sp.unshard(x, dim=1).transpose(1, 2) for x in (q, k, v))  # for the comparison only
dense = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=True).transpose(1, 2)
print(f"rank {sp.rank}: worst difference to dense attention {(full - dense).abs().max():.1e}")
