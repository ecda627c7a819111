"""Exact attention over a sequence that is sharded over 4 ranks, compared with dense attention.

torchrun --nproc-per-node 4 examples/attention.py
mpirun -n 4 python examples/attention.py
"""

import torch

from wf_backends import SequenceParallel, SequenceParallelConfig, launch

launch.init()  # torchrun, mpirun, srun, deepspeed
route = {"name": "concentric", "team_size": 2}  # or "ring", "all_gather", a mesh, "auto"
config = {"sequence_parallel_size": 4, "route": route, "layout": "zigzag", "ulysses_degree": 1}
sp = SequenceParallel(SequenceParallelConfig.from_dict(config))
torch.manual_seed(0)  # all ranks draw the same whole tensors
q, k, v = (sp.shard(torch.randn(1, 4096, 8, 64), dim=1) for _ in range(3))  # this rank's rows
out = sp.attention(q, k, v, causal=True)  # exact, differentiable, this rank's rows
full = sp.unshard(out, dim=1)  # (1, 4096, 8, 64) on every rank
print(sp.report())  # bytes sent, by hop

# For the comparison only: dense attention over the whole sequence, on every rank.
full_qkv = (sp.unshard(x, dim=1).transpose(1, 2) for x in (q, k, v))
dense = torch.nn.functional.scaled_dot_product_attention(*full_qkv, is_causal=True)
difference = (full - dense.transpose(1, 2)).abs().max()
print(f"rank {sp.rank}: worst difference to dense attention {difference:.1e}")
