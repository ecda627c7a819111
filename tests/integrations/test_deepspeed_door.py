"""`wf_deepspeed.initialize`: what it passes on, what it refuses, and whose data a rank gets."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed", exc_type=ImportError)
pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

import deepspeed  # noqa: E402

from tests.integrations.deepspeed_jobs import run_ranks  # noqa: E402
from wf_backends import SequenceParallel, SequenceParallelConfig  # noqa: E402
from wf_backends.comm.threads import run_threads  # noqa: E402
from wf_deepspeed.entry import initialize_with, start  # noqa: E402
from wf_transformers import attach  # noqa: E402

pytestmark = pytest.mark.deepspeed

CONFIG = {"train_batch_size": 1, "wallfacer": {"sequence_parallel_size": 2, "route": "ring"}}


def signature(
    args: Any = None,
    model: Any = None,
    mpu: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """In place of deepspeed.initialize: its arguments that the door looks at, handed back."""
    return args, model, mpu, config


@pytest.mark.parametrize("block", [{}, {"wallfacer": {"enabled": False}}])
def test_without_a_block_everything_is_passed_on(block: dict[str, Any]) -> None:
    config = {"train_batch_size": 3, "wall_clock_breakdown": True, "wandb": {}} | block
    given = ("arguments", "model")
    assert initialize_with(signature, given, {"config": config}) == (*given, None, config)


@pytest.mark.parametrize("name", ["wallfacers", "WallFacer", "wall_facer"])
def test_a_misspelt_block_is_not_passed_over(name: str) -> None:
    with pytest.raises(ValueError, match=f'"{name}" is no known key; did you mean "wallfacer"'):
        initialize_with(signature, (), {"config": {name: {}}})


def test_without_a_configuration_deepspeed_decides() -> None:
    assert initialize_with(signature, (), {"model": 1}) == (None, 1, None, None)


@pytest.mark.parametrize("name", ["mpu", "mesh_param"])
def test_groups_beside_the_block_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f'{name}= beside an enabled "wallfacer" block'):
        initialize_with(signature, (), {"config": CONFIG, name: (1, 2), "model": nn.Linear(1, 1)})


def test_a_model_must_be_one() -> None:
    with pytest.raises(ValueError, match="model must be a torch.nn.Module, got .*NoneType"):
        initialize_with(signature, (), {"config": CONFIG})


@pytest.mark.parametrize("way", ["config", "config_params", "args"])
def test_the_block_is_found_wherever_deepspeed_finds_its_json(way: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"wallfacer": {"rote": "ring"}}))
    if way == "args":
        given: dict[str, Any] = {"args": type("Args", (), {"deepspeed_config": str(path)})()}
    else:
        given = {way: str(path)}
    with pytest.raises(ValueError, match="did you mean 'route'"):
        initialize_with(signature, (), given)


def test_the_device_is_chosen_before_groups_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the engine does later: NCCL connects a group on whatever device is current."""
    took: list[int] = []
    accelerator = deepspeed.accelerator.get_accelerator()
    monkeypatch.setattr(accelerator, "set_device", took.append)
    monkeypatch.setattr(deepspeed, "init_distributed", lambda *_, **__: None)
    monkeypatch.setattr(deepspeed.comm, "get_local_rank", lambda: 3)
    start()
    start({"args": SimpleNamespace(device_rank=1)})
    assert took == [3, 1]


class Attends(nn.Module):
    """A module of one's own that takes the SequenceParallel object."""

    def set_sequence_parallel(self, sp: SequenceParallel) -> None:
        self.sp = sp


def spread(model: nn.Module) -> list[Any]:
    """`attach(model, sp)` on two ranks that are threads."""
    config = SequenceParallelConfig(sequence_parallel_size=2, route="ring")
    return run_threads(2, lambda comm: attach(model, SequenceParallel(config, comm)))


def test_a_module_of_ones_own_is_given_the_object() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Attends())
    spread(model)
    assert isinstance(model[1].sp, SequenceParallel)


def test_a_model_that_cannot_attend_over_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing in Linear attends over ranks.*set_sequence"):
        spread(nn.Linear(2, 2))


@pytest.fixture(scope="module")
def loaders(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of 4 ranks saw, two ranks a sequence."""
    out = str(tmp_path_factory.mktemp("loaders") / "seen")
    run_ranks([str(Path(__file__).with_name("deepspeed_loaders.py")), out], 4)
    return [json.loads(Path(f"{out}.{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.processes
def test_ranks_know_their_group(loaders: list[dict[str, Any]]) -> None:
    assert [seen["data_parallel"] for seen in loaders] == [[0, 2], [0, 2], [1, 2], [1, 2]]


@pytest.mark.processes
def test_attention_has_a_group_of_its_own_that_waits_as_long(loaders: list[dict[str, Any]]) -> None:
    """Even where all ranks share a sequence: ZeRO's messages go through the world's group."""
    assert all(seen["own"] and all(seen["timeouts"]) for seen in loaders)


@pytest.mark.processes
@pytest.mark.parametrize("whose", ["theirs", "ours"])
def test_a_group_reads_the_same_samples_and_two_groups_different_ones(
    whose: str, loaders: list[dict[str, Any]]
) -> None:
    seen = [rank[whose] for rank in loaders]
    assert seen[0] == seen[1] and seen[2] == seen[3]
    everything = torch.tensor([seen[0], seen[2]]).flatten().tolist()
    assert sorted(everything) == list(range(16))


@pytest.mark.processes
def test_our_loader_shards_and_counts_a_step_ahead(loaders: list[dict[str, Any]]) -> None:
    assert all(rank["rows"] == 4 for rank in loaders)
    labels = torch.tensor([rank["labels"] for rank in loaders])  # (rank, micro-batch)
    steps = labels.sum(0).view(-1, 2).sum(1)  # two micro-batches a step
    for rank in loaders:
        assert rank["valid"] == steps.repeat_interleave(2).tolist()


@pytest.mark.processes
def test_labels_that_are_shifted_already_stay(loaders: list[dict[str, Any]]) -> None:
    """The first two samples of a group, numbers 0, 2 and 1, 3, have 2 + number % 4 labels each."""
    counts = [seen["unshifted"] for seen in loaders]
    assert [counts[0] + counts[1], counts[2] + counts[3]] == [6, 8]


@pytest.mark.processes
def test_a_batch_that_differs_inside_a_group_is_told_on_every_rank(
    loaders: list[dict[str, Any]],
) -> None:
    for rank in loaders:
        assert "input_ids" in rank["errors"][0]
        assert "shard the data by engine.wallfacer.data_parallel_rank (of 2)" in rank["errors"][0]


@pytest.mark.processes
def test_a_token_average_without_its_count_is_refused(loaders: list[dict[str, Any]]) -> None:
    for rank in loaders:
        assert '"gradient_accumulation_steps": 2 needs valid=' in rank["errors"][1]
