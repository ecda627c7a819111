"""Jobs of TRL's trainers, whose ranks are forks of a process that has imported TRL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import trl
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from tests.integrations.accelerate_jobs import Results, run_with_and_without
from tests.integrations.deepspeed_jobs import VOCABULARY

RELEASE = tuple(map(int, version("trl").split(".")[:2]))  # (1, 16) for TRL 1.16.0
HAS_FUSED_HEAD = RELEASE >= (1, 15)
CONCENTRIC = {"sequence_parallel_size": 4, "route": {"name": "concentric", "team_size": 2}}


def has(name: str) -> bool:
    """Whether TRL has the trainers of orpo, cpo or another method in some package."""
    return find_spec(f"trl.trainer.{name}_trainer") is not None or is_experimental(name)


def is_experimental(name: str) -> bool:
    """Whether the trainer of a method lives in trl.experimental, as most do since 0.26."""
    return (
        find_spec("trl.experimental") is not None
        and find_spec(f"trl.experimental.{name}") is not None
    )


def classes(name: str) -> tuple[Any, Any]:
    """The trainer of a method, such as "orpo", and its configuration."""
    package = import_module(f"trl.experimental.{name}") if is_experimental(name) else trl
    return tuple(getattr(package, f"{name.upper()}{kind}") for kind in ("Trainer", "Config"))


def taken(config_class: Any, **options: Any) -> dict[str, Any]:
    """Those of the options that this release's configuration has."""
    return {
        field.name: options[field.name] for field in fields(config_class) if field.name in options
    }


def run_trl(
    worker: str, cases: Mapping[str, Mapping[str, Any]], folder: Path
) -> tuple[Results, Results]:
    """Run the module `worker` with WallFacer and without; see `run_with_and_without`."""
    return run_with_and_without(f"{worker}.py", cases, folder, f"tests.integrations.{worker}")


def number_tokenizer(**options: str) -> PreTrainedTokenizerFast:
    """A tokenizer of texts such as "t5 t17", whose tokens are 5 and 17."""
    core = Tokenizer(WordLevel({f"t{n}": n for n in range(VOCABULARY)}, unk_token="t0"))
    core.pre_tokenizer = WhitespaceSplit()
    options = {"eos_token": "t1", "pad_token": "t0"} | options
    inputs = ["input_ids", "attention_mask"]  # of a Llama
    return PreTrainedTokenizerFast(tokenizer_object=core, model_input_names=inputs, **options)
