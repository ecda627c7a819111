"""Which parameters count as partitioned: their gradients and numbers are not compared."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

pytest.importorskip("transformers", reason="transformers is not installed")

from tests.helpers import run_processes  # noqa: E402
from tests.integrations.deepspeed_jobs import python  # noqa: E402
from wf_backends.comm import Communicator  # noqa: E402
from wf_transformers.comparison.gradients import is_partitioned  # noqa: E402

pytestmark = pytest.mark.processes


def partitioned_under_fsdp1(_: Communicator) -> list[bool]:
    options = {"use_orig_params": True, "device_id": torch.device("cpu")}
    model = FullyShardedDataParallel(nn.Linear(2, 2), **options)  # type: ignore[arg-type]
    return [is_partitioned(p) for p in model.parameters()]


def test_fsdp1_partitions_parameters() -> None:
    """Also where they are as they were: FSDP1 exchanges them around every call."""
    assert run_processes(2, partitioned_under_fsdp1, start=python()) == [[True, True]] * 2
    assert not is_partitioned(nn.Parameter(torch.zeros(2)))
