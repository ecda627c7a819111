"""docs/coming_from.md: its blocks are accepted, and the zigzag layout is that of torch."""

from __future__ import annotations

import json
import re

import pytest
import torch
from torch.distributed.tensor.experimental._context_parallel._load_balancer import (
    _HeadTailLoadBalancer,
)

from tests.helpers import ROOT, run_threads
from wf_backends import SequenceParallel, SequenceParallelConfig

PAGE = (ROOT / "docs" / "coming_from.md").read_text()
BLOCKS = re.findall(r"`(\{\"sequence_parallel_size\".*?\})`", PAGE)


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_run(block):
    config = SequenceParallelConfig.from_dict(json.loads(block))

    def rows(comm):
        return SequenceParallel(config, comm).attention(*torch.ones(3, 1, 2, 8, 4)).shape

    assert run_threads(8, rows) == [(1, 2, 8, 4)] * 8


@pytest.mark.parametrize("num_ranks", (2, 4))
def test_zigzag_has_the_rows_of_torch(num_ranks):
    indices = _HeadTailLoadBalancer(48, num_ranks, "cpu")._generate_indices().flatten()
    config = SequenceParallelConfig(
        sequence_parallel_size=num_ranks, route="ring", layout="zigzag", ulysses_degree=1
    )

    def rows(comm):
        return SequenceParallel(config, comm).shard(torch.arange(48), dim=0)

    for shard, expected in zip(run_threads(num_ranks, rows), indices.chunk(num_ranks), strict=True):
        assert torch.equal(shard, expected)


def test_the_page_has_blocks():
    assert len(BLOCKS) == 4
