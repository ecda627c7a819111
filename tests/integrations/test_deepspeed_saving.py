"""A checkpoint of DeepSpeed that a killed rank left incomplete is not found: the one before is."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")

from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3  # noqa: E402

from tests.integrations.deepspeed_jobs import run_ranks  # noqa: E402
from wf_backends import SequenceParallel, SequenceParallelConfig  # noqa: E402
from wf_backends.checkpoints import complete, find_checkpoint  # noqa: E402
from wf_deepspeed.saving import make_checkpoints_atomic  # noqa: E402
from wf_transformers import Handle  # noqa: E402


@pytest.fixture
def handle() -> Iterator[Handle]:
    with Handle(SequenceParallel(SequenceParallelConfig(sequence_parallel_size=1))) as handle:
        yield handle


def test_a_trainer_sees_the_options_of_saving(handle: Handle) -> None:
    """The Trainer saves a PEFT model of ZeRO 3 without its frozen parameters if the signature has
    `exclude_frozen_parameters`, and otherwise ends in a KeyError of PEFT."""
    engine: Any = SimpleNamespace(load_checkpoint=print)
    engine.save_checkpoint = save = lambda save_dir, exclude_frozen_parameters=False: True
    make_checkpoints_atomic(engine, handle)
    assert engine.save_checkpoint is not save
    assert "exclude_frozen_parameters" in inspect.signature(engine.save_checkpoint).parameters


pytestmark = pytest.mark.processes
SCRIPT = str(Path(__file__).with_name("deepspeed_killed_save.py"))


def test_a_rank_killed_while_it_saves_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"ranks \[(0, )?1\] failed"):
        run_ranks([SCRIPT, str(tmp_path)], 2)
    assert complete(tmp_path) == ["step1"]
    assert find_checkpoint(tmp_path).name == "step1"
    assert len([*(tmp_path / "step1").glob("*optim_states.pt")]) == 2
    with pytest.raises(ValueError, match="'step2' .* is incomplete: .* complete one is 'step1'"):
        find_checkpoint(tmp_path, "step2")


class Engine:
    """What `make_checkpoints_atomic` uses of DeepSpeed's engine; it writes and reads one file."""

    global_steps = 3
    checkpoint_engine = SimpleNamespace(is_decoupled=lambda: False)

    def use_node_local_storage(self) -> bool:
        return False

    load_universal_checkpoint = use_node_local_storage
    zero_optimization_stage = lambda _: 2  # noqa: E731

    def save_checkpoint(self, save_dir: str, tag: str, *_: Any) -> bool:
        return bool(Path(save_dir, tag, "states.txt").write_text("saved"))

    def load_checkpoint(self, load_dir: str, tag: str) -> str:
        return Path(load_dir, tag, "states.txt").read_text()


@pytest.mark.parametrize("tag", ["run1/step100", 7, None])
def test_any_tag_of_deepspeed_is_saved_and_loaded(
    tag: object, tmp_path: Path, handle: Handle
) -> None:
    engine: Any = Engine()
    make_checkpoints_atomic(engine, handle)
    engine.save_checkpoint(str(tmp_path), tag)
    assert engine.load_checkpoint(str(tmp_path), tag) == "saved"
    assert engine.load_checkpoint(str(tmp_path)) == "saved"
    assert not [*tmp_path.glob("*.part")]


@pytest.mark.parametrize("universal", [False, True])
@pytest.mark.parametrize(
    ("files", "stage", "saved"),
    [("zero_pp_rank_1_mp_rank_00", 2, "3"), ("mp_rank_00", 3, "0, 1 or 2"), ("mp_rank_00", 1, "")],
)
def test_a_checkpoint_of_zero_3_is_refused_at_another_stage(
    universal: bool, files: str, stage: int, saved: str, tmp_path: Path, handle: Handle
) -> None:
    """DeepSpeed's own error is an AssertionError without a message."""
    engine: Any = Engine()
    engine.load_universal_checkpoint = lambda: universal
    engine.zero_optimization_stage = lambda: stage
    engine.load_checkpoint = lambda folder, tag: (None, {})
    make_checkpoints_atomic(engine, handle)
    (tmp_path / "step1").mkdir()
    torch.save({}, tmp_path / "step1" / f"{files}_model_states.pt")
    (tmp_path / ("latest_universal" if universal else "latest")).write_text("step1")
    expected = pytest.raises(ValueError, match=f"step1 was saved at ZeRO {saved}, and this engine")
    with expected if saved else nullcontext():
        engine.load_checkpoint(str(tmp_path), None)


class UniversalOptimizer(DeepSpeedZeroOptimizer_Stage3):
    """What DeepSpeed's loading of a universal checkpoint at ZeRO 3 uses, for two groups."""

    swap_optimizer = False

    def __init__(self) -> None:
        parameters = self.fp32_partitioned_groups_flat = [nn.Parameter(torch.ones(2)) for _ in "ab"]
        groups = [{"params": [p], "weight_decay": 0.5 * k} for k, p in enumerate(parameters)]
        self.optimizer = torch.optim.AdamW(groups)
        self.fp16_groups = self.fp16_partitioned_groups = [[p] for p in parameters]
        self.fp16_partitioned_groups_flat = parameters
        self.param_names = dict.fromkeys(parameters, "name")
        self.unflatten = lambda flat, _: [flat]

    def _load_global_state_stage3(self, sd: Any) -> None:
        pass

    def load_hp_checkpoint_state(self, folder: str, key: str, param: Any) -> Any:
        return torch.zeros(2)


def test_groups_keep_their_own_steps_and_options_in_a_universal_checkpoint(
    tmp_path: Path, handle: Handle
) -> None:
    """Of ZeRO 3: DeepSpeed's own loading shares one counter, and the first group's options."""
    optimizer: Any = UniversalOptimizer()
    groups = [{"weight_decay": 0.5 * k, "lr": 0.1 * (k + 1), "params": [k]} for k in range(2)]
    states = {"state": {0: {"step": torch.tensor(7.0)}}, "param_groups": groups}
    (tmp_path / "u" / "zero").mkdir(parents=True)
    torch.save({"optimizer_state_dict": states}, tmp_path / "u" / "zero" / "optimizer_state.pt")

    def load(folder: str, tag: str) -> tuple[str, dict[str, Any]]:
        optimizer.load_hp_checkpoint_state_from_checkpoint_dir_stage3(str(Path(folder, tag)))
        return str(Path(folder, tag, "states.pt")), {}

    engine: Any = SimpleNamespace(
        save_checkpoint=None,
        load_checkpoint=load,
        load_universal_checkpoint=lambda: True,
        use_node_local_storage=lambda: False,
        zero_optimization_stage=lambda: 3,
        optimizer=optimizer,
    )
    make_checkpoints_atomic(engine, handle)
    engine.load_checkpoint(str(tmp_path), "u")
    inner, parameters = optimizer.optimizer, optimizer.fp32_partitioned_groups_flat
    assert [(g["weight_decay"], g["lr"]) for g in inner.param_groups] == [(0.0, 0.1), (0.5, 0.2)]
    for group, parameter in zip(inner.param_groups, parameters, strict=True):
        group["params"], parameter.grad = [parameter], torch.ones(2)
    inner.step()
    assert [float(inner.state[p]["step"]) for p in parameters] == [8.0, 8.0]
