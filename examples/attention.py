"""Exact attention over a sequence that no rank holds whole.

torchrun --nproc-per-node 4 examples/attention.py
mpirun -n 4 python examples/attention.py
"""

import torch

from wf_backends import SequenceParallel, SequenceParallelConfig, launch

launch.init()
sp = SequenceParallel(SequenceParallelConfig.from_dict({"sequence_parallel_size": 4}))
torch.manual_seed(0)
q, k, v = (torch.randn(1, 4096, 8, 64) for _ in range(3))  # the whole, for the comparison only
out = sp.attention(*(sp.shard(x, dim=1) for x in (q, k, v)), causal=True)
full = sp.unshard(out, dim=1)
q, k, v = (x.transpose(1, 2) for x in (q, k, v))
dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
print(f"rank {sp.rank}: worst difference {(full - dense.transpose(1, 2)).abs().max():.1e}")
