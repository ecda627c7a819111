"""Sequences over ranks of a model that transformers cuts when it loads it: `DistributedConfig`.

Experts, and what FSDP2 and tensor parallelism cut, are over the ranks of a sequence or of several.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="transformers is not installed")
distributed = pytest.importorskip("transformers.distributed", reason="not in this transformers")

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from transformers import AutoModelForCausalLM, Qwen3MoeConfig  # noqa: E402

import wf_transformers  # noqa: E402
from tests.helpers import run_processes  # noqa: E402
from tests.integrations.deepspeed_jobs import VOCABULARY, python  # noqa: E402
from wf_backends import SequenceParallel, SequenceParallelConfig  # noqa: E402
from wf_backends.comm import Communicator  # noqa: E402

if "ep_size" not in distributed.DistributedConfig.__dataclass_fields__:
    pytest.skip("this transformers has no expert parallelism of its own", allow_module_level=True)

pytestmark = pytest.mark.processes

STEPS, RANKS = 3, 4
DTYPE = torch.float32  # transformers' expert parallelism is wrong in float64, without us too


class Setting(NamedTuple):
    """The sizes of what the ranks do; fsdp x tp is the number of ranks."""

    fsdp: int
    tp: int
    experts: int
    sequence: int

    @property
    def sequences(self) -> int:
        return self.fsdp // self.sequence


SETTINGS = {
    "experts-in-a-sequence": Setting(fsdp=4, tp=1, experts=4, sequence=4),
    "experts-over-sequences": Setting(fsdp=4, tp=1, experts=4, sequence=2),
    "copies-of-experts": Setting(fsdp=4, tp=1, experts=2, sequence=4),
    "tensor-parallelism": Setting(fsdp=2, tp=2, experts=4, sequence=2),
}


def save_model(folder: Path) -> None:
    """A model of eight experts, with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = Qwen3MoeConfig(**sizes, **heads, **experts)
    AutoModelForCausalLM.from_config(config, dtype=DTYPE).save_pretrained(folder)


def batches_of_step(step: int, sequences: int) -> list[dict[str, Any]]:
    """A batch for each sequence; they have different numbers of labels."""
    batches: list[dict[str, Any]] = []
    for number in range(sequences):
        random = torch.Generator().manual_seed(10 * step + number)
        ids = torch.randint(VOCABULARY, (1, 32), generator=random)
        ids[:, 1::2] = (ids[:, ::2] * 5 + 3) % VOCABULARY  # every second token can be learnt
        labels = ids.clone()
        labels[:, : 7 * number] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def losses_on_ranks(comm: Communicator, folder: str) -> dict[str, list[float]]:
    """The mean loss over the sequences in each step of SGD, by setting."""
    return {name: losses_of(setting, folder) for name, setting in SETTINGS.items()}


def losses_of(setting: Setting, folder: str) -> list[float]:
    fsdp, tp, experts, size = setting
    config = distributed.DistributedConfig(fsdp_size=fsdp, tp_size=tp, ep_size=experts)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, dtype=DTYPE)
    mesh = init_device_mesh("cpu", (fsdp, tp), mesh_dim_names=("sp", "tp"))
    group = mesh["sp"].get_group()
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=size, route="ring"), group)
    handle = wf_transformers.attach(model, sp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses: list[float] = []
    for step in range(STEPS):
        batch = batches_of_step(step, setting.sequences)[dist.get_rank(group) // size]
        local = handle.shard_batch(batch)
        logits = model(**wf_transformers.forward_kwargs(model, local)).logits
        loss = handle.loss(logits, local["labels"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    return losses


def losses_alone(folder: str, sequences: int) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses: list[float] = []
    for step in range(STEPS):
        batches = batches_of_step(step, sequences)
        loss: Any = sum(model(**batch).loss for batch in batches) / sequences
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    save_model(path)
    return os.fspath(path)


@pytest.fixture(scope="module")
def results_by_rank(folder: str) -> list[dict[str, list[float]]]:
    return run_processes(RANKS, losses_on_ranks, folder, timeout=280.0, start=python())


@pytest.mark.parametrize("name", SETTINGS)
def test_losses_are_those_of_one_device(
    name: str, folder: str, results_by_rank: list[dict[str, list[float]]]
) -> None:
    expected = losses_alone(folder, SETTINGS[name].sequences)
    for results in results_by_rank:
        assert results[name] == pytest.approx(expected, rel=2e-6)
    assert expected[-1] < expected[0] - 0.01  # so that 2e-6 says something about gradients
