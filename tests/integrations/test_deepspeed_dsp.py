""" "dsp" in a DeepSpeed JSON: its averages over the ranks give one rank's training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed", exc_type=ImportError)
pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

from tests.integrations.deepspeed_jobs import ROOT, run_ranks  # noqa: E402
from wf_backends import SequenceParallel  # noqa: E402
from wf_backends.comm import World  # noqa: E402
from wf_backends.dsp.model import spread  # noqa: E402
from wf_backends.dsp.switch import DynamicSequenceParallel  # noqa: E402
from wf_deepspeed.config import read_block  # noqa: E402

TWO = ["space", "time", "space", "time"]
MIX = ["space", "full", "time", "full"]
ZERO = range(4)
STAGES: dict[str, Any] = {
    "dims": {"time": 1, "space": 2},
    "needs": {"blocks.[02]": "space", "blocks.[13]": "time"},
    "enters": "blocks.0",
    "starts_along": "time",
    "leaves": "final",
}
MIX_STAGES = STAGES | {"needs": {"blocks.0": "space", "blocks.2": "time"}}
BLOCK = {"sequence_parallel_size": 2, "dsp": STAGES}
MIXES = {"ring": {"route": {"name": "ring"}}, "lss": {"strategy": "lss"}}


def case(name: str, block: Any, zero: int = 0, stages: Any = TWO, accumulation: int = 1) -> Any:
    words = {"stages": stages, "zero": zero, "accumulation": accumulation}
    return {"name": name, "block": block, **words}


JOBS = {
    1: [
        case("alone", None),
        case("mix alone", None, stages=MIX),
        case("two samples", None, accumulation=2),
    ],
    2: [
        *(case(f"zero {zero}", BLOCK, zero) for zero in ZERO),
        case("unmodified", BLOCK, 1),
        *(
            case(f"mix {name}", {**BLOCK, **words, "dsp": MIX_STAGES}, 2, MIX)
            for name, words in MIXES.items()
        ),
    ],
    4: [case("two groups", BLOCK, zero=2)],
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    worker = Path(__file__).with_name("deepspeed_dsp_worker.py")
    results: dict[str, dict[str, Any]] = {}
    for ranks, cases in JOBS.items():
        folder = tmp_path_factory.mktemp(f"dsp{ranks}")
        (folder / "cases.json").write_text(json.dumps(cases))
        run_ranks([str(worker), str(folder)], ranks)
        results |= json.loads((folder / "found.json").read_text())
    return results


PAIRS = [
    *((f"zero {zero}", "alone") for zero in ZERO),
    ("unmodified", "alone"),
    *((f"mix {name}", "mix alone") for name in MIXES),
    ("two groups", "two samples"),
]


@pytest.mark.deepspeed
@pytest.mark.processes
@pytest.mark.parametrize(("ours", "alone"), PAIRS)
def test_ranks_train_as_one(ours: str, alone: str, found: dict[str, dict[str, Any]]) -> None:
    right = found[alone]["losses"]
    assert right[-1] < right[0] - 0.01
    assert found[ours]["losses"] == pytest.approx(right, abs=1e-5)
    assert found[ours]["sent"]["forward switch"] == found[ours]["sent"]["backward switch"] > 0


@pytest.mark.deepspeed
@pytest.mark.processes
def test_full_attention_meets_by_the_other_words(found: dict[str, dict[str, Any]]) -> None:
    """Gathered once forward and once backward by "lss", in two of the four stages."""
    assert "backward home" in found["mix lss"]["sent"]
    steps = {name: [at for at in found[f"mix {name}"]["sent"] if " step " in at] for name in MIXES}
    assert steps["ring"] and not steps["lss"]


@pytest.mark.deepspeed
@pytest.mark.processes
def test_the_component_takes_whole_batches(found: dict[str, dict[str, Any]]) -> None:
    for ours, _ in PAIRS:
        assert found[ours]["whole"] and found[ours]["hooks"] == 0
        assert found[ours]["loss_error"] < 1e-6
        assert "do not agree (values by rank): video" in found[ours]["refused"]
        assert "data_parallel_rank" in found[ours]["refused"]


def test_the_documented_json_is_that_of_the_tests() -> None:
    page = (ROOT / "docs" / "dsp.md").read_text()
    config = json.loads(page.split("```json")[1].split("```")[0])
    assert config["wallfacer"] == BLOCK
    assert read_block(config) is not None


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in STAGES.items() if name != key}


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ({"dsp": STAGES | {"need": {}}}, "\"dsp\": unknown key 'need'; did you mean 'needs'"),
        ({"dsp": without("leaves")}, "\"dsp\": 'leaves' is missing"),
        ({"dsp": STAGES | {"starts_along": "tme"}}, "starts_along.*'tme'; did you mean 'time'"),
        ({"dsp": STAGES | {"dims": ["time", "space"]}}, "dims must be an object such as .*'time'"),
        ({"dsp": STAGES | {"dims": {"time": "1", "space": 2}}}, "dims must be an object"),
        ({"dsp": STAGES | {"needs": "time"}}, "needs must be an object such as .*got 'time'"),
        ({"dsp": True}, '"dsp": must be an object with the keys of Stages, got True'),
        ({"dsp": STAGES, "layout": "zigzag"}, '"layout": "zigzag" contradicts "dsp"'),
        ({"dsp": STAGES, "loss_average": "token"}, 'loss_average": "token" contradicts'),
        ({"dps": STAGES}, "wallfacer.dps.*did you mean 'dsp'"),
    ],
)
def test_wrong_words_are_refused(block: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_block({"wallfacer": block})


@pytest.mark.parametrize(
    ("key", "value"), [("route", "ring"), ("strategy", "lss"), ("kernel", "sdpa")]
)
def test_words_of_attention_that_no_module_takes_are_refused(key: str, value: str) -> None:
    block = read_block({"wallfacer": {"dsp": STAGES, key: value}})
    assert block is not None and block.dsp is not None
    comm = World(1).comm(0)
    sp = SequenceParallel(block.sequence_parallel, comm)
    dsp = DynamicSequenceParallel(comm, gradients="averaged")
    with pytest.raises(ValueError, match=f'"{key}": .*beside "dsp".*no module of Linear attends'):
        spread(nn.Linear(1, 1), sp, dsp, block.dsp)
