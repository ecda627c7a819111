"""`wf_deepspeed.initialize`: arguments, refusals, process groups, and the data of each rank.

The loaders are tested in one job of four ranks, two for each sequence (deepspeed_loaders.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore
from torch.utils.data import DataLoader

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed", exc_type=ImportError)
pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

import deepspeed  # noqa: E402
from deepspeed.moe.sharded_moe import TopKGate  # noqa: E402
from deepspeed.runtime.tensor_parallel import init_utils  # noqa: E402

from tests.integrations.deepspeed_jobs import run_ranks  # noqa: E402
from wf_backends import SequenceParallel, SequenceParallelConfig  # noqa: E402
from wf_backends.comm import Board  # noqa: E402
from wf_backends.comm.threads import run_threads  # noqa: E402
from wf_backends.launch import agreement  # noqa: E402
from wf_deepspeed import entry  # noqa: E402
from wf_deepspeed.entry import CONFIG_ARGUMENTS, _gathered_parameters, initialize_with, start  # noqa: E402
from wf_deepspeed.handle import ShardedLoader  # noqa: E402
from wf_transformers import attach  # noqa: E402

pytestmark = pytest.mark.deepspeed

CONFIG = {"train_batch_size": 1, "wallfacer": {"sequence_parallel_size": 2, "route": "ring"}}


def arguments_of_initialize(
    args: Any = None,
    model: Any = None,
    mpu: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """Stand for deepspeed.initialize: return the arguments that ours reads or sets."""
    return args, model, mpu, config


@pytest.mark.parametrize("block", [{}, {"wallfacer": {"enabled": False}}])
def test_without_an_enabled_block_all_arguments_reach_deepspeed(block: dict[str, Any]) -> None:
    config = {"train_batch_size": 3, "wall_clock_breakdown": True, "wandb": {}} | block
    args = ("arguments", "model")
    received = initialize_with(arguments_of_initialize, args, {"config": config})
    assert received == (*args, None, config)


@pytest.mark.parametrize("missing_at", [0, 1, 2])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_a_block_that_one_rank_lacks_is_an_error_on_a_rank_that_comes_later(
    monkeypatch: pytest.MonkeyPatch, missing_at: int, order: tuple[int, ...]
) -> None:
    """The rank without it calls DeepSpeed's collectives, the others ours: a wait to the timeout."""
    board, errors = Board(HashStore()), []
    monkeypatch.setattr(agreement, "job_board", lambda: board)
    monkeypatch.setattr(entry.dist, "is_initialized", lambda: True)
    for rank in order:
        monkeypatch.setattr(entry.dist, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(entry.dist, "get_world_size", lambda: 3)
        entry.refuse_missing_block(has_block=True)  # the first engine
        try:
            entry.refuse_missing_block(has_block=rank != missing_at)
        except ValueError as error:
            errors.append(str(error))
    assert errors and all(f"False on rank {missing_at}" in error for error in errors), errors


@pytest.mark.parametrize("name", ["wallfacers", "WallFacer", "wall_facer"])
def test_a_misspelt_block_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f'"{name}" is an unknown key; did you mean "wallfacer"'):
        initialize_with(arguments_of_initialize, (), {"config": {name: {}}})


def test_without_a_configuration_all_arguments_reach_deepspeed() -> None:
    assert initialize_with(arguments_of_initialize, (), {"model": 1}) == (None, 1, None, None)


@pytest.mark.parametrize("name", ["mpu", "mesh_param"])
def test_groups_beside_the_block_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f'{name}= beside an enabled "wallfacer" block'):
        initialize_with(
            arguments_of_initialize,
            (),
            {"config": CONFIG, name: (1, 2), "model": nn.Linear(1, 1)},
        )


def test_a_mixture_of_deepspeed_that_drops_tokens_is_refused() -> None:
    """Two ranks would drop tokens beyond the capacity for their own: other ones than one rank."""
    model = nn.Sequential(TopKGate(4, 2))
    with pytest.raises(NotImplementedError, match=r"^0 drops tokens .* drop_tokens=False"):
        initialize_with(arguments_of_initialize, (None, model), {"config": CONFIG})


def test_tensor_parallelism_by_tp_model_init_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed remembers the call, and shards the model in every later initialize."""
    monkeypatch.setattr(init_utils, "_TP_MODEL_INIT_ARGS", None)  # put back at the end
    init_utils.record_tp_model_init_args(2, torch.float32, None, None)
    with pytest.raises(NotImplementedError, match=r"tp_model_init\(tp_size=2\).*wallfacer"):
        initialize_with(arguments_of_initialize, (), {"config": CONFIG, "model": nn.Linear(1, 1)})


def test_the_mesh_of_an_earlier_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed keeps it for every later engine, and at ZeRO 0 reduces gradients over it."""
    monkeypatch.setattr(entry.groups_of_deepspeed, "mesh_device", object())
    with pytest.raises(NotImplementedError, match=r"earlier engine .*mesh_param.*wallfacer"):
        initialize_with(arguments_of_initialize, (), {"config": CONFIG, "model": nn.Linear(1, 1)})


def test_a_model_that_is_not_a_module_is_refused() -> None:
    with pytest.raises(ValueError, match="model must be a torch.nn.Module, got .*NoneType"):
        initialize_with(arguments_of_initialize, (), {"config": CONFIG})


@pytest.mark.parametrize(
    "argument", ["config", "config_params", "deepspeed_config", "deepscale_config"]
)
def test_the_block_is_read_from_each_argument_that_may_name_the_json(
    argument: str, tmp_path: Path
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"wallfacer": {"rote": "ring"}}))
    arguments: dict[str, Any] = {argument: str(path)}
    if argument in CONFIG_ARGUMENTS:
        arguments = {"args": SimpleNamespace(**dict.fromkeys(CONFIG_ARGUMENTS) | arguments)}
    with pytest.raises(ValueError, match="did you mean 'route'"):
        initialize_with(arguments_of_initialize, (), arguments)


def test_start_sets_the_device_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine sets it only later, but NCCL connects a group on the current device."""
    devices: list[int] = []
    accelerator = deepspeed.accelerator.get_accelerator()
    monkeypatch.setattr(accelerator, "set_device", devices.append)
    monkeypatch.setattr(deepspeed, "init_distributed", lambda *_, **__: None)
    monkeypatch.setattr(deepspeed.comm, "get_local_rank", lambda: 3)
    start()
    start({"args": SimpleNamespace(device_rank=1)})
    assert devices == [3, 1]


def test_parameters_that_are_gathered_already_are_not_gathered_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """BERT's decoder shares its bias with the module around it."""
    gathered: list[Any] = []
    monkeypatch.setattr(deepspeed.zero, "GatheredParameters", gathered.append)
    module = nn.Linear(2, 2)
    module.weight.data = torch.empty(0)  # as ZeRO 3 leaves it
    _gathered_parameters(module)
    assert [list(map(id, parameters)) for parameters in gathered] == [[id(module.weight)]]


class CustomAttention(nn.Module):
    """A user's own module, which takes the SequenceParallel object."""

    def set_sequence_parallel(self, sp: SequenceParallel) -> None:
        self.sp = sp


def attach_on_two_ranks(model: nn.Module) -> list[Any]:
    """Call `attach(model, sp)` on two ranks that are threads."""
    config = SequenceParallelConfig(sequence_parallel_size=2, route="ring")
    return run_threads(2, lambda comm: attach(model, SequenceParallel(config, comm)))


def test_set_sequence_parallel_of_a_custom_module_is_called() -> None:
    model = nn.Sequential(nn.Linear(2, 2), CustomAttention())
    attach_on_two_ranks(model)
    assert isinstance(model[1].sp, SequenceParallel)


def test_a_model_without_attention_is_refused() -> None:
    doors = "nothing in Linear attends over ranks.*wf_diffusers.attach.*set_sequence"
    with pytest.raises(ValueError, match=doors):
        attach_on_two_ranks(nn.Linear(2, 2))


@pytest.fixture(scope="module")
def loaders(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of deepspeed_loaders.py by rank: 4 ranks, two for each sequence."""
    out = str(tmp_path_factory.mktemp("loaders") / "result")
    run_ranks([str(Path(__file__).with_name("deepspeed_loaders.py")), out], 4)
    return [json.loads(Path(f"{out}.{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.processes
def test_the_data_parallel_rank_is_the_number_of_the_group(loaders: list[dict[str, Any]]) -> None:
    assert [rank["data_parallel"] for rank in loaders] == [[0, 2], [0, 2], [1, 2], [1, 2]]


@pytest.mark.processes
def test_attention_has_a_separate_group_with_the_timeout_of_the_world(
    loaders: list[dict[str, Any]],
) -> None:
    """Even where all ranks share a sequence: ZeRO's messages go through the world's group."""
    for rank in loaders:
        assert rank["sequence_group_is_separate"]
        assert rank["timeouts_equal_the_world"] == [True, True]


@pytest.mark.processes
@pytest.mark.parametrize("loader", ["deepspeed_loader", "wallfacer_loader"])
def test_ranks_of_a_group_read_the_same_samples_and_groups_different_ones(
    loader: str, loaders: list[dict[str, Any]]
) -> None:
    samples = [rank[loader] for rank in loaders]
    assert samples[0] == samples[1] and samples[2] == samples[3]
    assert sorted(torch.tensor([samples[0], samples[2]]).flatten().tolist()) == list(range(16))


@pytest.mark.processes
def test_a_new_batch_size_of_the_engine_is_counted_over_groups(
    loaders: list[dict[str, Any]],
) -> None:
    """16 samples: two for each of two groups, four times."""
    assert [rank["accumulation_of_16_samples"] for rank in loaders] == [4] * 4


@pytest.mark.processes
def test_a_later_engine_without_the_block_is_deepspeeds_own(loaders: list[dict[str, Any]]) -> None:
    """16 samples: two for each of four ranks, twice."""
    assert [rank["accumulation_of_a_later_engine"] for rank in loaders] == [2] * 4


@pytest.mark.processes
def test_our_loader_gives_each_rank_half_of_a_sequence(loaders: list[dict[str, Any]]) -> None:
    assert [rank["local_seqlen"] for rank in loaders] == [4] * 4


@pytest.mark.processes
def test_our_loader_counts_the_valid_labels_of_a_step_over_all_ranks(
    loaders: list[dict[str, Any]],
) -> None:
    labels = torch.tensor([rank["local_labels"] for rank in loaders])  # (rank, micro-batch)
    labels_of_step = labels.sum(0).view(-1, 2).sum(1)  # two micro-batches per step
    for rank in loaders:
        assert rank["valid_labels"] == labels_of_step.repeat_interleave(2).tolist()


@pytest.mark.processes
def test_labels_that_are_already_shifted_are_not_shifted(loaders: list[dict[str, Any]]) -> None:
    """Group 0 reads samples 0 and 2, group 1 reads 1 and 3; sample n has 2 + n % 4 labels."""
    counts = [rank["shifted_labels"] for rank in loaders]
    assert [counts[0] + counts[1], counts[2] + counts[3]] == [6, 8]


@pytest.mark.processes
def test_a_batch_that_differs_inside_a_group_is_an_error_on_every_rank(
    loaders: list[dict[str, Any]],
) -> None:
    for rank in loaders:
        message = rank["different_batches_error"]
        assert "input_ids" in message
        assert "shard the data by engine.wallfacer.data_parallel_rank (of 2)" in message


@pytest.mark.processes
def test_a_token_average_without_the_count_of_the_step_is_refused(
    loaders: list[dict[str, Any]],
) -> None:
    for rank in loaders:
        assert '"gradient_accumulation_steps": 2 needs valid=' in rank["missing_count_error"]


@pytest.mark.processes
@pytest.mark.parametrize("entry", ["deepspeed", "accelerate"])
def test_different_sizes_of_a_sequence_are_an_error_on_every_rank(
    entry: str, loaders: list[dict[str, Any]]
) -> None:
    """Their groups would differ, and every rank wait until the timeout."""
    for rank in loaders:
        message = rank["different_sizes_errors"][entry]
        assert 'sequence_parallel_size": 2 (ranks [0, 1, 2]), 4 (ranks [3])' in message


@pytest.mark.parametrize(("averages_tokens", "expected"), [(True, 4), (False, 5)])
def test_the_length_of_a_loader_is_the_number_of_its_batches(
    averages_tokens: bool, expected: int
) -> None:
    """With "loss_average": "token" the incomplete last optimizer step is dropped."""
    handle: Any = SimpleNamespace(averages_tokens=averages_tokens, _accumulation=lambda: 2)
    assert len(ShardedLoader(handle, DataLoader(range(5)))) == expected  # type: ignore[arg-type]
