"""Sequence parallelism inside the stages of torch's pipelines: losses and weights of one device.

The ranks are a mesh of 2 x 2, "pp" and "sp". The ranks of a stage share its sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from torch import Tensor, nn

pytest.importorskip("transformers", reason="transformers is not installed")

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

import wf_transformers  # noqa: E402
from tests.helpers import run_processes  # noqa: E402
from tests.integrations.deepspeed_jobs import (  # noqa: E402
    VOCABULARY,
    python,
    tiny_llama,
)
from wf_backends import SequenceParallel, SequenceParallelConfig  # noqa: E402
from wf_backends.comm import Communicator  # noqa: E402

pytestmark = pytest.mark.processes

LAYERS, MICRO_BATCHES, STEPS = 4, 4, 2
CASES: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "Schedule1F1B": ((0,), (1,)),
    "ScheduleZBVZeroBubble": ((0, 3), (1, 2)),
}
"""Schedule of torch -> the stages of the first and of the second rank of "pp"."""
Result = tuple[list[float], dict[str, Tensor]]


class Stage(nn.Module):
    """Some layers of a Llama; the first stage has its embeddings, the last one its head."""

    def __init__(self, model: Any, index: int, count: int) -> None:
        super().__init__()
        inner, last, size = model.model, index == count - 1, LAYERS // count
        self.embed = inner.embed_tokens if index == 0 else nn.Identity()
        self.layers = inner.layers[index * size : (index + 1) * size]
        self.rotary = inner.rotary_emb
        self.head = nn.Sequential(inner.norm, model.lm_head) if last else nn.Identity()

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        x = self.embed(x)
        rotary = self.rotary(x, kwargs["position_ids"])
        for layer in self.layers:
            x = layer(x, position_embeddings=rotary, **kwargs)
            x = x[0] if isinstance(x, tuple) else x  # as in transformers 4
        return self.head(x)


def samples(documents: bool) -> dict[str, Any]:
    ids = torch.randint(VOCABULARY, (MICRO_BATCHES, 40), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids} | ({"cu_seqlens": (0, 13, 40)} if documents else {})


def run_all(comm: Communicator) -> dict[str, Result]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "sp"))
    group, _ = dist.new_subgroups_by_enumeration(mesh.mesh.tolist())
    return {name: run(name, mesh, group) for name in CASES}


def run(name: str, mesh: Any, group: Any) -> Result:
    """The losses of all steps, on ranks with the last stage, and the weights of this rank."""
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=2, route="ring"), group)
    model = tiny_llama(LAYERS).double()
    handle = wf_transformers.attach(model, sp)
    indices, count = CASES[name][mesh["pp"].get_local_rank()], 2 * len(CASES[name][0])
    modules = [Stage(model, index, count) for index in indices]
    for module in modules:
        fully_shard(module, mesh=mesh["sp"])
    stages = [
        pipelining.PipelineStage(
            module, index, count, torch.device("cpu"), group=mesh["pp"].get_group()
        )
        for module, index in zip(modules, indices, strict=True)
    ]
    given: Any = stages if len(stages) > 1 else stages[0]
    schedule = getattr(pipelining, name)(given, MICRO_BATCHES, loss_fn=handle.loss)
    optimizer = torch.optim.AdamW([p for m in modules for p in m.parameters()], lr=1e-3)
    local = handle.shard_batch(samples(documents=len(stages) == 1))
    kwargs = {k: local[k] for k in ("position_ids", "cu_seqlens") if k in local}
    args = [local["input_ids"]] if 0 in indices else []
    losses: list[float] = []
    for _ in range(STEPS):
        step_losses: list[Tensor] = []
        last = {"target": local["labels"], "losses": step_losses} if count - 1 in indices else {}
        schedule.step(*args, **kwargs, **last)
        optimizer.step()
        optimizer.zero_grad()
        if step_losses:
            loss = torch.stack(step_losses).detach().mean()
            dist.all_reduce(loss, group=group)
            losses.append(loss.item() / 2)
    whole = {f"{i}.{key}": p for i, m in zip(indices, modules, strict=True) for key, p in full(m)}
    return losses, whole


def full(module: nn.Module) -> list[tuple[str, Tensor]]:
    parameters = [(key, p.detach()) for key, p in module.named_parameters()]
    return [(key, p.full_tensor() if isinstance(p, DTensor) else p) for key, p in parameters]


def train_on_one_device(name: str) -> Result:
    """Sample by sample; documents one after the other, as transformers knows no borders here."""
    model, count = tiny_llama(LAYERS).double(), 2 * len(CASES[name][0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch, losses = samples(documents=count == 2), []
    borders = batch.get("cu_seqlens", (0, batch["input_ids"].shape[1]))
    num_labels = borders[-1] - len(borders) + 1
    for _ in range(STEPS):
        losses.append(0.0)
        for ids in batch["input_ids"]:
            for start, end in pairwise(borders):
                document = ids[None, start:end]
                logits = model(document).logits[0, :-1]
                total = nn.functional.cross_entropy(logits, document[0, 1:], reduction="sum")
                loss = total / num_labels / MICRO_BATCHES
                loss.backward()
                losses[-1] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    stages = {f"{i}.{key}": p for i in range(count) for key, p in full(Stage(model, i, count))}
    return losses, stages


@pytest.fixture(scope="module")
def results_by_rank() -> list[dict[str, Result]]:
    return run_processes(4, run_all, timeout=280.0, start=python())


@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_trains_as_one_device(
    name: str, results_by_rank: list[dict[str, Result]]
) -> None:
    """To 1e-7, as Llama's norms compute in float32; with packed documents under 1F1B."""
    expected_losses, expected = train_on_one_device(name)
    seen: set[str] = set()
    for results in results_by_rank:
        losses, weights = results[name]
        assert not losses or losses == pytest.approx(expected_losses, rel=1e-7)
        for key, weight in weights.items():
            assert (weight - expected[key]).abs().max() <= 1e-7 * expected[key].abs().max(), key
        seen |= weights.keys()
    assert seen == expected.keys() and any(results[name][0] for results in results_by_rank)
