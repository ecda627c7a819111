"""Generation over ranks that are processes: weights in parts, and a rank that ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytest.importorskip("transformers")

import wf_transformers  # noqa: E402
from tests.helpers import run_processes  # noqa: E402
from tests.integrations.deepspeed_jobs import python  # noqa: E402
from tests.integrations.families import Family, build  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    LLAMA,
    VOCAB,
    sequence_parallel,
)
from wf_backends.comm import Communicator, make_comm  # noqa: E402

pytestmark = pytest.mark.processes
OPTIONS = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": 1}
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")


def llama() -> Any:
    family = Family("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "num_key_value_heads": 2})
    return build(family).eval()


def prompt() -> Tensor:
    return torch.randint(5, VOCAB, (1, 23), generator=torch.Generator().manual_seed(3))


def in_fsdp(comm: Communicator) -> Tensor:
    """Tokens of 4 ranks of one sequence, whose weights are in 4 parts."""
    model = llama()
    with wf_transformers.attach(model, sequence_parallel(comm), verify=False) as handle:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        return wf_transformers.generate(model, handle, prompt(), **OPTIONS)


def in_tensor_parallel(comm: Communicator) -> Tensor:
    """Tokens of 2 ranks of one sequence, each of 2 ranks of tensor parallelism."""
    mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sp", "tp")), llama()
    plan = {f"model.layers.*.*.{name}": ColwiseParallel() for name in COLUMNS}
    plan |= {f"model.layers.*.*.{name}": RowwiseParallel() for name in ROWS}
    parallelize_module(model, mesh["tp"], plan)
    sp = sequence_parallel(make_comm(mesh["sp"].get_group()))
    with wf_transformers.attach(model, sp, verify=False) as handle:
        return wf_transformers.generate(model, handle, prompt(), **OPTIONS)


@pytest.mark.parametrize("run", [in_fsdp, in_tensor_parallel])
def test_weights_in_parts_give_the_tokens_of_one_process(run: Any):
    expected = llama().generate(prompt(), **OPTIONS)
    assert all(torch.equal(tokens, expected) for tokens in run_processes(4, run, start=python()))


def ends_on_rank_1(comm: Communicator) -> str:
    """The error of rank 0, whose peer leaves after two tokens."""
    model, calls = llama(), []

    def leave(*_: Any) -> None:
        calls.append(1)
        if comm.rank == 1 and len(calls) == 3:
            raise KeyError("rank 1 leaves")

    model.model.layers[1].register_forward_pre_hook(leave)
    with wf_transformers.attach(model, sequence_parallel(comm), verify=False) as handle:
        try:
            wf_transformers.generate(model, handle, prompt(), **OPTIONS)
        except (KeyError, RuntimeError) as error:
            return str(error)
    return "no error"


def test_a_rank_that_leaves_is_named():
    texts = run_processes(2, ends_on_rank_1, group_timeout=5, start=python())
    assert "rank 1" in texts[0] and "'decode'" in texts[0]
