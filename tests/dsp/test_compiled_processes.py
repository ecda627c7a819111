"""Stages that torch compiles, at the comparison of the first forward; ranks are processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests import forked
from tests.dsp.test_first_forward import STAGES, WIDTH, Model
from tests.helpers import run_processes
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.dsp import DynamicSequenceParallel, Stages, spread


def graphs_of_the_first_forward(comm: Any) -> int:
    """How many graphs torch has compiled; an error if the first forward cannot be compared."""
    graphs: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.manual_seed(0)
    model: Any = Model(nn.Identity())
    model.space = torch.compile(model.space, backend=keep, dynamic=True)
    config = SequenceParallelConfig(sequence_parallel_size=comm.size, layout="contiguous")
    dsp = DynamicSequenceParallel(comm, gradients="averaged")
    spread(model, SequenceParallel(config, comm), dsp, Stages(**STAGES), "strict")
    model(torch.ones(2, 5, 6, WIDTH))
    return len(graphs)


@pytest.mark.processes
def test_the_first_forward_is_compared_without_compiling_its_stages():
    start = forked.python("tests.helpers", __name__, "torch._dynamo")
    assert run_processes(2, graphs_of_the_first_forward, start=start) == [1, 1]
