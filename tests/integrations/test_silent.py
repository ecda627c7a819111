"""What would silently train to another result is found by `verify`, its own check taken out.

Each configuration runs twice: without the check or cure that it has, where `verify` names what
differs, and with it, where it trains, or is refused by that check.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)
pytest.importorskip("accelerate", reason="accelerate is not installed", exc_type=ImportError)

from tests.helpers import run_threads  # noqa: E402
from tests.integrations.deepspeed_jobs import run_ranks  # noqa: E402
from tests.integrations.test_verify import DIFFERS  # noqa: E402

WORKER = str(Path(__file__).with_name("silent_worker.py"))
MASK = "the output of model.layers.0.self_attn.o_proj is the first"
NOISE = "the output of model.embed_tokens is the first"
LOSS = "its loss is the first"
REFUSED_MASK = r"attention_mask must be a tensor \(1, 24\)"
TRAINS = "^$"
DDP: list[tuple[str, str, str]] = [
    ("mask", MASK, REFUSED_MASK),
    ("neftune", NOISE, TRAINS),
    ("entropy", LOSS, TRAINS),
    ("token_weights", LOSS, TRAINS),
    ("z_loss", LOSS, TRAINS),
    ("own_loss", LOSS, TRAINS),
    ("inner_call", MASK, "LlamaModel was called without position_ids"),
    ("padded_labels", LOSS, TRAINS),
]
ZERO = [
    ("mask", 1, MASK, REFUSED_MASK),
    ("neftune", 0, NOISE, TRAINS),
    ("entropy", 2, LOSS, TRAINS),
    ("mask", 3, MASK, REFUSED_MASK),
    ("entropy", 3, LOSS, TRAINS),
]


def run(folder: Path, cases: list[Any], *start: str) -> dict[str, str]:
    """What a Trainer's first step raised by case, on two ranks."""
    (folder / "cases.json").write_text(json.dumps(cases))
    run_ranks([*start, WORKER, str(folder)], 2)
    told = json.loads((folder / "found.json").read_text())
    return {json.dumps(case): text for case, text in zip(cases, told, strict=True)}


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    cases = [[name, cured, None] for name, *_ in DDP for cured in (False, True)]
    return run(tmp_path_factory.mktemp("ddp"), cases)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed", exc_type=ImportError)
    cases = [[name, cured, zero] for name, zero, *_ in ZERO for cured in (False, True)]
    return run(tmp_path_factory.mktemp("zero"), cases, "-m", "wf_deepspeed")


def assert_told(text: str, where: str) -> None:
    import re

    assert re.search(where, text), text


@pytest.mark.processes
@pytest.mark.parametrize(("name", "where", "cured"), DDP)
def test_a_trainer(name: str, where: str, cured: str, trainers: dict[str, str]) -> None:
    assert_told(trainers[json.dumps([name, False, None])], f"{DIFFERS}: {where} that differs")
    assert_told(trainers[json.dumps([name, True, None])], cured)


@pytest.mark.processes
@pytest.mark.deepspeed
@pytest.mark.parametrize(("name", "zero", "where", "cured"), ZERO)
def test_an_unmodified_script_under_deepspeed(
    name: str, zero: int, where: str, cured: str, engines: dict[str, str]
) -> None:
    assert_told(engines[json.dumps([name, False, zero])], f"{DIFFERS}: {where} that differs")
    assert_told(engines[json.dumps([name, True, zero])], cured)
