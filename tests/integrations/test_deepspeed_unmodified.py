"""`python -m wf_deepspeed script.py`: a script that does not import WallFacer trains on its ranks.

How its model takes whole batches: test_deepspeed_whole_batches.py.
"""

from __future__ import annotations

import json
from argparse import Namespace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed", exc_type=ImportError)
pytest.importorskip("accelerate", reason="accelerate is not installed", exc_type=ImportError)
pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

import accelerate  # noqa: E402
import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from transformers import LlamaForSequenceClassification  # noqa: E402

import wf_deepspeed  # noqa: E402
from tests.integrations.deepspeed_jobs import run_ranks, tiny_llama  # noqa: E402
from tests.integrations.deepspeed_trainer import NUM_EVALUATED, assert_logits_close  # noqa: E402
from tests.integrations.transformers_models import one_rank  # noqa: E402
from wf_deepspeed import unmodified  # noqa: E402
from wf_deepspeed.__main__ import main, split  # noqa: E402
from wf_deepspeed.config import BATCH_KEYS  # noqa: E402
from wf_deepspeed.handle import WallFacer  # noqa: E402
from wf_transformers import WholeBatchHooks, attach  # noqa: E402
from wf_transformers.whole_batches.hooks import TAKES_WHOLE  # noqa: E402

pytestmark = [pytest.mark.deepspeed, pytest.mark.processes]

SCRIPT = str(Path(__file__).with_name("deepspeed_trainer.py"))
MODULE = ["-m", "tests.integrations.deepspeed_trainer"]
PYTHON_M_WF_DEEPSPEED = """
import sys, wf_deepspeed
from wf_deepspeed.__main__ import main
with wf_deepspeed.without_shared_memory_op():
    main(sys.argv[1:])
"""
"""`python -m wf_deepspeed`, without half a minute of compilation at the first run."""
RING = {"sequence_parallel_size": 2, "route": {"name": "ring"}}


PREPARED_SCHEDULERS = """
import deepspeed, torch, wf_accelerate, wf_deepspeed
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DummyOptim, DummyScheduler
PartialState(cpu=True)  # Accelerator(cpu=True) would leave DeepSpeed out

def prepare(make_optimizer, make_scheduler, **config):
    AcceleratorState._reset_state()  # an accelerator for each call
    config |= {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model = torch.nn.Linear(2, 2)
    optimizer = make_optimizer(model.parameters(), lr=1.0)
    with wf_accelerate.counted_by_group(accelerator, lambda: 2):
        with wf_deepspeed.without_shared_memory_op():
            prepared = accelerator.prepare(model, optimizer, make_scheduler(optimizer))
    assert isinstance(prepared[0], deepspeed.DeepSpeedEngine), type(prepared[0])
    return prepared

def by_step(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step))

engine, _, scheduler = prepare(torch.optim.SGD, by_step)
engine.backward(engine(torch.ones(1, 2)).sum())
scheduler.step()
assert scheduler.get_last_lr() == [1.0], scheduler.get_last_lr()

def ten_steps(optimizer):
    return DummyScheduler(optimizer, total_num_steps=10, warmup_num_steps=2)

names = ("total_num_steps", "warmup_num_steps", "warmup_max_lr", "warmup_min_lr")
decay = {"type": "WarmupDecayLR", "params": dict.fromkeys(names, "auto")}
adam = {"type": "AdamW", "params": {"lr": 1.0, "torch_adam": True}}
engine, *_ = prepare(DummyOptim, ten_steps, optimizer=adam, scheduler=decay)
assert engine.lr_scheduler.total_num_steps == 10, engine.lr_scheduler.total_num_steps
"""

LEFT_OUT = """
import pytest, torch, wf_accelerate, wf_deepspeed
from accelerate import Accelerator, DeepSpeedPlugin
block = {"sequence_parallel_size": 1}
config = {"train_batch_size": 1, "zero_optimization": {"stage": 0}, "wallfacer": block}
accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
with wf_deepspeed.opened(), pytest.raises(ValueError, match="leaves out DeepSpeed"):
    accelerator.prepare(torch.utils.data.DataLoader([1, 2]))
with pytest.raises(ValueError, match="which cpu=True leaves out"):
    wf_accelerate.connect(torch.nn.Linear(2, 2), accelerator, block)
"""

GENERATES = """
import sys, deepspeed, torch, wf_deepspeed
from tests.integrations.deepspeed_jobs import tiny_llama
adam = {"type": "AdamW", "params": {"torch_adam": True}}
config = {"train_batch_size": 1, "optimizer": adam}
config["zero_optimization"] = {"stage": int(sys.argv[1])}
ids, options = torch.arange(8)[None], {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
expected = tiny_llama().generate(ids, **options)
with wf_deepspeed.without_shared_memory_op(), wf_deepspeed.opened():
    config["wallfacer"] = {"sequence_parallel_size": 1}
    engine = deepspeed.initialize(model=tiny_llama(), config=config)[0]
    assert torch.equal(engine.module.generate(ids, **options), expected)
"""


def train_without_wallfacer(folder: Path, ranks: int, accumulation: int) -> dict[str, Any]:
    """Run the script without DeepSpeed, under torch's DDP if there are several ranks."""
    out = folder / f"{ranks}.json"
    run_ranks([SCRIPT, str(out), str(accumulation)], ranks)
    return json.loads(out.read_text())


def train_with_wallfacer(
    folder: Path, program: list[str], ranks: int, accumulation: int, stage: int
) -> dict[str, Any]:
    """Run the script or module under DeepSpeed at a ZeRO stage, with two ranks for each sequence.

    Two ranks are new interpreters, which import the modules in the order of a user's job.
    """
    out = folder / f"{ranks}_{stage}.json"
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage},
        "wallfacer": {"enabled": True, **RING},
    }
    path = folder / f"ds_{ranks}_{stage}.json"
    path.write_text(json.dumps(config))
    program = [*program, str(out), str(accumulation), str(path)]
    run_ranks(["-c", PYTHON_M_WF_DEEPSPEED, *program], ranks, fresh=ranks == 2)
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    ("program", "groups", "accumulation", "stage"),
    [(MODULE, 1, 4, 2), ([SCRIPT], 2, 2, 3)],
    ids=["module", "script"],
)
def test_a_trainer_trains_as_without_wallfacer(
    program: list[str], groups: int, accumulation: int, stage: int, tmp_path: Path
) -> None:
    """Groups of two ranks, beside one process for each group, in float32."""
    expected = train_without_wallfacer(tmp_path, groups, accumulation)
    actual = train_with_wallfacer(tmp_path, program, 2 * groups, accumulation, stage)
    assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    for step, expected_step in zip(actual["steps"], expected["steps"], strict=True):
        assert step["loss"] == pytest.approx(expected_step["loss"], abs=1e-4)  # logged as rounded
        assert step["grad_norm"] == pytest.approx(expected_step["grad_norm"], rel=1e-5)
    assert actual["eval"]["eval_loss"] == pytest.approx(expected["eval"]["eval_loss"], rel=1e-5)
    logits, expected_logits = (torch.tensor(result["logits"]) for result in (actual, expected))
    assert logits.shape == expected_logits.shape and len(logits) == NUM_EVALUATED
    assert_logits_close(logits, expected_logits)


def test_schedulers_that_accelerate_prepares_beside_deepspeed_count_groups() -> None:
    run_ranks(["-c", PREPARED_SCHEDULERS], 2)


def test_a_deepspeed_config_that_accelerate_leaves_out_is_refused() -> None:
    run_ranks(["-c", LEFT_OUT], 1)


@pytest.mark.parametrize("stage", ["2", "3"])
def test_a_model_generates_as_without_us(stage: str) -> None:
    """In an evaluation of a Trainer with `predict_with_generate`, or a callback."""
    run_ranks(["-c", GENERATES, stage], 1)


def test_opened_restores_the_functions_that_it_replaces() -> None:
    def replaced_functions() -> tuple[Any, ...]:
        cls = accelerate.Accelerator
        return deepspeed.initialize, cls.prepare_data_loader, cls.gather_for_metrics

    before = replaced_functions()
    with pytest.raises(ZeroDivisionError), wf_deepspeed.opened():
        for function, original in zip(replaced_functions(), before, strict=True):
            assert function is not original
        raise ZeroDivisionError
    assert replaced_functions() == before


def test_a_script_that_makes_the_process_group_gets_the_one_that_is_there() -> None:
    """python -m wf_deepspeed makes one before the script; torch refuses a second one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        there = dist.group.WORLD
        with wf_deepspeed.opened():
            dist.init_process_group("gloo", rank=0, world_size=1)
            dist.init_process_group()
            assert dist.group.WORLD is there
            with pytest.raises(ValueError, match=r"init_process_group\('mpi'\)"):
                dist.init_process_group("mpi")
            with pytest.raises(ValueError, match="world_size=2.*all 1 ranks"):
                dist.init_process_group("gloo", rank=0, world_size=2)
            with pytest.warns(RuntimeWarning, match="--timeout=SECONDS"):
                dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    finally:
        dist.destroy_process_group()
    with wf_deepspeed.opened():  # without a group it is torch's own
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()


def test_an_engine_without_a_block_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = (SimpleNamespace(), None, None, None)
    monkeypatch.setattr(deepspeed, "initialize", lambda model=None, config=None: plain)
    without, disabled = {"train_batch_size": 1}, {"wallfacer": {"enabled": False}}
    with wf_deepspeed.opened(), pytest.warns(RuntimeWarning, match='no "wallfacer"') as caught:
        assert deepspeed.initialize(config=without) == plain
        assert deepspeed.initialize(config=disabled) == plain
    assert len(caught) == 1


@pytest.mark.parametrize("has_head_over_rows", [False, True])
def test_an_engine_made_again_takes_the_place_of_the_first(
    has_head_over_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As auto_find_batch_size makes it; other hooks stay, and `WholeBatchHooks` refuses them."""
    plain = (SimpleNamespace(), None, None, None)
    monkeypatch.setattr(deepspeed, "initialize", lambda model=None, config=None: plain)
    model: Any = tiny_llama()
    model = LlamaForSequenceClassification(model.config) if has_head_over_rows else model
    handle = object.__new__(WallFacer)
    attached = attach(model, one_rank(), verify=False)
    vars(handle).update(vars(attached))
    for owner, is_kept in ((attached, True), (handle, False)):
        WholeBatchHooks(model, owner)
        with wf_deepspeed.opened():
            deepspeed.initialize(model=model, config={"wallfacer": {"enabled": False}})
        assert (vars(model).get(TAKES_WHOLE) is owner) == is_kept
        attached.remove()


def test_a_missing_script_is_an_error_with_a_usage_line() -> None:
    with pytest.raises(AssertionError, match=r"usage: python -m wf_deepspeed .* 'nowhere.py'"):
        run_ranks(["-m", "wf_deepspeed", "nowhere.py"], 1)


@pytest.mark.parametrize("timeout", ["abc", "nan", "-1"])
def test_a_timeout_that_is_no_number_is_an_error_with_a_usage_line(timeout: str) -> None:
    with pytest.raises(SystemExit, match=r"usage: .* --timeout must be a number of seconds"):
        main([f"--timeout={timeout}", "train.py"])


def test_a_missing_module_is_an_error_with_a_usage_line() -> None:
    with pytest.raises(AssertionError, match=r"usage: .* there is no module 'nowhere.train'"):
        run_ranks(["-m", "wf_deepspeed", "-m", "nowhere.train"], 1)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--local_rank=3", "train.py", "-x"],
            (600.0, False, ["train.py", "--local_rank=3", "-x"]),
        ),
        (
            ["train.py", "--local_rank=3", "-x"],
            (600.0, False, ["train.py", "--local_rank=3", "-x"]),
        ),
        (["--local_rank=3", "-m", "train", "-x"], (600.0, True, ["train", "--local_rank=3", "-x"])),
        (["--local_rank=3", "--timeout=7.5", "a.py"], (7.5, False, ["a.py", "--local_rank=3"])),
        (["--timeout=7.5", "a.py", "--timeout=7.5"], (7.5, False, ["a.py", "--timeout=7.5"])),
        (["train.py", "--timeout=3"], (600.0, False, ["train.py", "--timeout=3"])),
        (["train.py", "-m", "x"], (600.0, False, ["train.py", "-m", "x"])),
        (["-m"], (600.0, True, [])),
        ([], (600.0, False, [])),
    ],
)
def test_options_before_the_program_are_not_its_own(
    arguments: list[str], expected: tuple[float, bool, list[str]]
) -> None:
    """But --local_rank, which the deepspeed launcher puts there."""
    assert split(arguments) == expected


RANKS_BATCH = {  # counted over 4 ranks: 2 * 3 * 4
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 3,
    "train_batch_size": 24,
    "wallfacer": RING,
}
GROUPS_BATCH = RANKS_BATCH | {"train_batch_size": 12}


@pytest.fixture
def four_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimpleNamespace(is_initialized=lambda: True, get_world_size=lambda: 4)
    monkeypatch.setattr(unmodified, "dist", world)


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("name", ["config", "config_params"])
def test_a_batch_size_counted_over_ranks_is_counted_over_groups(name: str) -> None:
    arguments = {"args": None, name: RANKS_BATCH}
    assert unmodified.with_group_batch_size(arguments) == {name: GROUPS_BATCH}


@pytest.mark.usefixtures("four_ranks")
def test_a_corrected_file_of_args_is_given_as_config(tmp_path: Path) -> None:
    """DeepSpeed refuses a configuration that is given twice; the script's args stay as they are."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(RANKS_BATCH))
    args = Namespace(deepspeed_config=str(path), local_rank=1)
    assert unmodified.with_group_batch_size({"args": args}) == {
        "args": Namespace(deepspeed_config=None, local_rank=1),
        "config": GROUPS_BATCH,
    }
    assert args.deepspeed_config == str(path)


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(
    "config",
    [GROUPS_BATCH, RANKS_BATCH | dict.fromkeys(BATCH_KEYS, "auto")],
    ids=["counted over groups", "not filled in"],
)
def test_other_batch_sizes_are_kept(config: dict[str, Any]) -> None:
    assert unmodified.with_group_batch_size({"config": config}) == {}
