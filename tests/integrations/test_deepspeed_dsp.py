"""DSP under DeepSpeed: a video transformer trains on 2 and 4 ranks as on one without WallFacer.

And wrong keys of "dsp" in the JSON are refused.
"""

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

TWO_DIMS = ["space", "time", "space", "time"]  # which dimension each of the four blocks mixes
MIX = ["space", "full", "time", "full"]
ZERO_STAGES = range(4)
STAGES: dict[str, Any] = {
    "dims": {"time": 1, "space": 2},
    "needs": {"blocks.[02]": "space", "blocks.[13]": "time"},
    "enters": "blocks.0",
    "starts_along": "time",
    "leaves": "final",
}
MIX_STAGES = STAGES | {"needs": {"blocks.0": "space", "blocks.2": "time"}}
BLOCK = {"sequence_parallel_size": 2, "dsp": STAGES}
FULL_ATTENTION = {"ring": {"route": {"name": "ring"}}, "lss": {"strategy": "lss"}}
"""How the stages that mix both dimensions attend, beside DSP's exchanges: the keys of the block."""


def case(
    name: str, block: Any, zero: int = 0, stages: Any = TWO_DIMS, accumulation: int = 1
) -> dict[str, Any]:
    """A case of deepspeed_dsp_worker.py; without a block it is the reference."""
    return {
        "name": name,
        "block": block,
        "zero": zero,
        "stages": stages,
        "accumulation": accumulation,
    }


JOBS = {
    1: [
        case("one rank", None),
        case("mix on one rank", None, stages=MIX),
        case("two samples on one rank", None, accumulation=2),
    ],
    2: [
        *(case(f"zero {zero}", BLOCK, zero) for zero in ZERO_STAGES),
        case("unmodified", BLOCK, zero=1),
        *(
            case(f"mix {name}", {**BLOCK, **keys, "dsp": MIX_STAGES}, zero=2, stages=MIX)
            for name, keys in FULL_ATTENTION.items()
        ),
    ],
    4: [case("two groups", BLOCK, zero=2)],
}
"""The cases by the number of ranks."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What deepspeed_dsp_worker.py measured, by case."""
    worker = Path(__file__).with_name("deepspeed_dsp_worker.py")
    results: dict[str, dict[str, Any]] = {}
    for ranks, cases in JOBS.items():
        folder = tmp_path_factory.mktemp(f"dsp{ranks}")
        (folder / "cases.json").write_text(json.dumps(cases))
        run_ranks([str(worker), str(folder)], ranks)
        results |= json.loads((folder / "results.json").read_text())
    return results


REFERENCES = {
    **{f"zero {zero}": "one rank" for zero in ZERO_STAGES},
    "unmodified": "one rank",
    **{f"mix {name}": "mix on one rank" for name in FULL_ATTENTION},
    "two groups": "two samples on one rank",
}
"""The case on one rank, without WallFacer, that each case is compared with."""


@pytest.mark.deepspeed
@pytest.mark.processes
@pytest.mark.parametrize(("name", "reference"), REFERENCES.items())
def test_losses_are_those_of_one_rank(
    name: str, reference: str, results: dict[str, dict[str, Any]]
) -> None:
    """In float32; the model learns, so a wrong gradient would show in the next loss."""
    expected = results[reference]["losses"]
    assert expected[-1] < expected[0] - 0.01
    assert results[name]["losses"] == pytest.approx(expected, abs=1e-5)
    sent = results[name]["bytes_sent"]
    assert sent["forward switch"] == sent["backward switch"] > 0


@pytest.mark.deepspeed
@pytest.mark.processes
def test_full_attention_follows_the_other_keys_of_the_block(
    results: dict[str, dict[str, Any]],
) -> None:
    """The ring sends rows in steps; "lss" gathers them, and reduces gradients once."""
    ring, lss = (results[f"mix {name}"]["bytes_sent"] for name in ("ring", "lss"))
    assert any(" step " in label for label in ring)
    assert "backward reduce" in lss and not any(" step " in label for label in lss)


@pytest.mark.deepspeed
@pytest.mark.processes
@pytest.mark.parametrize("name", REFERENCES)
def test_the_handle_takes_whole_batches(name: str, results: dict[str, dict[str, Any]]) -> None:
    """Batches are not cut, the loss is that of whole logits, and different batches are refused."""
    result = results[name]
    assert result["batch_is_whole"]
    assert result["loss_error"] < 1e-6
    assert "do not agree (values by rank): video" in result["different_batches_error"]
    assert "data_parallel_rank" in result["different_batches_error"]


@pytest.mark.deepspeed
@pytest.mark.processes
@pytest.mark.parametrize("name", [name for name in REFERENCES if name != "zero 3"])
def test_remove_takes_all_hooks_from_the_model(
    name: str, results: dict[str, dict[str, Any]]
) -> None:
    """Not at ZeRO 3, which has hooks of its own."""
    assert results[name]["hooks_after_remove"] == 0


def test_the_json_in_the_documentation_is_the_tested_one() -> None:
    page = (ROOT / "docs" / "dsp.md").read_text()
    config = json.loads(page.split("```json")[1].split("```")[0])
    assert config["wallfacer"] == BLOCK
    assert read_block(config) is not None


def stages_without(key: str) -> dict[str, Any]:
    return {name: value for name, value in STAGES.items() if name != key}


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"dsp": STAGES | {"need": {}}}, "\"dsp\": unknown key 'need'; did you mean 'needs'"),
        ({"dsp": stages_without("leaves")}, "\"dsp\": 'leaves' is missing"),
        ({"dsp": STAGES | {"starts_along": "tme"}}, "starts_along.*'tme'; did you mean 'time'"),
        ({"dsp": STAGES | {"dims": ["time", "space"]}}, "dims must be an object such as .*'time'"),
        ({"dsp": STAGES | {"dims": {"time": "1", "space": 2}}}, "dims must be an object"),
        ({"dsp": STAGES | {"needs": "time"}}, "needs must be an object such as .*got 'time'"),
        ({"dsp": True}, '"dsp" must be an object with the keys .*, got True'),
        ({"dsp": STAGES, "layout": "zigzag"}, '"layout": "zigzag" contradicts "dsp"'),
        ({"dsp": STAGES, "loss_average": "token"}, 'loss_average": "token" contradicts'),
        ({"dps": STAGES}, "\"wallfacer\": unknown key 'dps'; did you mean 'dsp'"),
    ],
)
def test_wrong_keys_and_values_are_refused(block: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_block({"wallfacer": block})


@pytest.mark.parametrize(
    ("key", "value"), [("route", "ring"), ("strategy", "lss"), ("kernel", "sdpa")]
)
def test_keys_of_attention_for_a_model_without_attention_are_refused(key: str, value: str) -> None:
    block = read_block({"wallfacer": {"dsp": STAGES, key: value}})
    assert block is not None and block.dsp is not None
    comm = World(1).comm(0)
    sp = SequenceParallel(block.sequence_parallel, comm)
    dsp = DynamicSequenceParallel(comm, gradients="averaged")
    with pytest.raises(ValueError, match=f'"{key}": .*beside "dsp".*no module of Linear attends'):
        spread(nn.Linear(1, 1), sp, dsp, block.dsp)
