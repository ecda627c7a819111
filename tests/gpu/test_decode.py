"""New tokens on ranks that share one GPU: as exact as attention of one rank, and the same text."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dense import largest
from tests.gpu.ranks_on_gpu import DEVICE, GpuCase, attend_alone, masks, reference
from tests.helpers import run_threads
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import Communicator
from wf_backends.decode import KeyValueCache

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]
SEQLEN = 1072
CALLS = (1, 3, 1, 40, *[1] * 12)  # new tokens of each call
NEW = sum(CALLS)
MAX_ERROR_RATIO = 1.3  # of several ranks to one, as in test_ranks.py
CASES = {
    "bfloat16": GpuCase(SEQLEN, "causal"),
    "float32": GpuCase(SEQLEN, "causal", torch.float32),
    "window": GpuCase(SEQLEN, "window"),
    "softcap": GpuCase(SEQLEN, "causal", softcap=5.0),
    "alibi": GpuCase(SEQLEN, "causal", alibi=True),
    "sinks": GpuCase(SEQLEN, "causal", sinks=True),
}


def new_tokens(comm: Communicator, case: GpuCase) -> Tensor:
    """(b, NEW, h, d): the last tokens in several calls, after a prompt of all others."""
    config = {"sequence_parallel_size": comm.size, "route": "ring", "kernel": case.kernel}
    sp = SequenceParallel(SequenceParallelConfig.from_dict(config), comm)
    q, k, v, _ = case.tensors()
    window = masks(SEQLEN)[case.mask].get("window_size", (-1, -1))
    prompt, cache = SEQLEN - NEW, KeyValueCache(sp, window)
    cache.keep(sp.shard(k[:, :prompt]), sp.shard(v[:, :prompt]), prompt)
    stops = accumulate(CALLS, initial=prompt)
    tokens = [[x[:, start:stop] for x in (q, k, v)] for start, stop in pairwise(stops)]
    return torch.cat([cache.attention(*qkv, **case.options()) for qkv in tokens], dim=1)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_new_tokens_are_as_exact_as_one_rank(ranks: int, case: GpuCase):
    expected = reference(case)[0][:, -NEW:]

    def error(out: Tensor) -> float:
        return float((out[:, -NEW:].double() - expected).norm() / expected.norm())

    one_rank = error(run_threads(1, attend_alone, case)[0][0])
    errors = [error(out) for out in run_threads(ranks, new_tokens, case)]
    print(f"\n{ranks} ranks, {case}: {largest(errors):.2e} ({one_rank:.2e})", flush=True)
    assert largest(errors) <= MAX_ERROR_RATIO * one_rank


def test_a_llama_on_two_ranks_generates_the_tokens_of_one_process():
    pytest.importorskip("transformers")
    import wf_transformers
    from tests.integrations.families import Family, build
    from tests.integrations.transformers_models import LLAMA, VOCAB

    family = Family("LlamaForCausalLM", "LlamaConfig", LLAMA)
    models: list[Any] = [build(family).to(DEVICE).eval() for _ in range(3)]
    ids = torch.randint(5, VOCAB, (2, 40), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = models[-1].generate(ids, **options)

    def rank(comm: Communicator) -> Tensor:
        model = models[comm.rank]
        sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=comm.size), comm)
        with wf_transformers.attach(model, sp, verify=False) as handle:
            return wf_transformers.generate(model, handle, ids, **options)

    assert all(torch.equal(tokens, expected) for tokens in run_threads(2, rank))
