"""torch's tensor parallelism and FSDP2 over other dimensions of a mesh: gradients of one device.

transformers' own plans (`tp_plan`, transformers 5's `DistributedConfig`) are the same operations.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="transformers is not installed")

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import wf_transformers  # noqa: E402
from tests.helpers import run_processes  # noqa: E402
from tests.integrations.deepspeed_jobs import (  # noqa: E402
    dense_loss_sum,
    python,
    text,
    tiny_llama,
)
from wf_backends import SequenceParallel, SequenceParallelConfig  # noqa: E402
from wf_backends.comm import Communicator  # noqa: E402

pytestmark = pytest.mark.processes

COLUMNS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
)
ROWS = ("self_attn.o_proj", "mlp.down_proj")
SETTINGS: dict[str, dict[str, Any]] = {
    "attached-first": {"order": ("sp", "tp"), "words": {"route": "ring"}},
    "attached-last": {"order": ("tp", "sp"), "words": {"route": "ring"}},
    "ulysses": {"order": ("tp", "sp"), "words": {"ulysses_degree": 2}, "heads": 4},
    "planned": {"order": ("tp", "sp"), "words": {}},
    "fsdp": {"order": ("tp", "sp", "fsdp"), "words": {"route": "ring"}},
    "fsdp-before": {"order": ("tp", "fsdp", "sp"), "words": {"route": "ring"}},
}


def tiny_model(setting: dict[str, Any]) -> Any:
    return tiny_llama(num_key_value_heads=setting.get("heads", 2)).double()


def gradients(comm: Communicator) -> dict[str, tuple[float, dict[str, torch.Tensor]]]:
    """(loss, whole gradients) of each setting."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sp", "tp"))
    return {name: gradients_of(mesh, setting) for name, setting in SETTINGS.items()}


def gradients_of(mesh: Any, setting: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    group, _ = dist.new_subgroups_by_enumeration(mesh.mesh.T.tolist())
    config = SequenceParallelConfig.from_dict({"sequence_parallel_size": 2, **setting["words"]})
    sp, model = SequenceParallel(config, group), tiny_model(setting)
    do = {
        "sp": lambda: wf_transformers.attach(model, sp),
        "tp": lambda: parallelize_module(model, mesh["tp"], plan()),
        "fsdp": lambda: fully_shard(model, mesh=mesh["sp"]),
    }
    for step in setting["order"]:
        do[step]()
    local = sp.shard_batch(next(text(0)))
    logits = model(**wf_transformers.forward_kwargs(model, local)).logits
    loss = sp.loss(logits, local["labels"])
    (loss * sp.size).backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
        if "fsdp" not in setting["order"]:  # which averages over the ranks of a sequence
            dist.all_reduce(whole, group=group)
            whole /= sp.size
        found[name] = whole
    return total.item(), found


def plan() -> dict[str, Any]:
    columns = {f"model.layers.*.{name}": ColwiseParallel() for name in COLUMNS}
    return columns | {f"model.layers.*.{name}": RowwiseParallel() for name in ROWS}


def test_gradients_are_those_of_one_device() -> None:
    """To 1e-7 of the largest of each weight: Llama's norms compute in float32."""
    by_rank = run_processes(4, gradients, timeout=280.0, start=python())
    for name, setting in SETTINGS.items():
        model = tiny_model(setting)
        total, valid = dense_loss_sum(model, next(text(0)))
        (total / valid).backward()
        for found in by_rank:
            loss, grads = found[name]
            assert loss == pytest.approx((total / valid).item(), rel=1e-7), name
            for key, parameter in model.named_parameters():
                largest = parameter.grad.abs().max()
                assert (grads[key] - parameter.grad).abs().max() <= 1e-7 * largest, (name, key)


def refusals(comm: Communicator) -> list[str]:
    """What attaching, or the first call, says where ranks of "tp" share a sequence."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sp", "tp"))
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=2), mesh["tp"].get_group())
    told = []
    for order in ("tp", "sp"), ("tp", "fsdp", "sp"), ("sp", "tp"):
        model = tiny_llama()
        for step in order:
            try:
                if step == "tp":
                    parallelize_module(model, mesh["tp"], plan())
                elif step == "fsdp":
                    fully_shard(model, mesh=mesh["sp"])
                else:
                    wf_transformers.attach(model, sp)
            except ValueError as error:
                told.append(str(error))
        if order == ("sp", "tp"):
            local = sp.shard_batch(next(text(0)))
            for _ in range(2):
                try:
                    model(**wf_transformers.forward_kwargs(model, local))
                except ValueError as error:
                    told.append(str(error))
    return told


def test_ranks_of_a_sequence_are_not_those_of_tensor_parallelism() -> None:
    for rank, told in enumerate(run_processes(4, refusals, timeout=280.0, start=python())):
        ranks = [0, 1] if rank < 2 else [2, 3]
        assert len(told) == 4
        for message in told:
            assert (
                f"q_proj.weight is in parts on the ranks {ranks}, and ranks {ranks} share"
                in message
            )
