"""Jobs of TRL's trainers, whose ranks are forks of a process that has imported TRL."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from tests.integrations.accelerate_jobs import Results, run_with_and_without
from tests.integrations.deepspeed_jobs import VOCABULARY

RELEASE = tuple(map(int, version("trl").split(".")[:2]))  # (1, 16) for TRL 1.16.0
HAS_FUSED_HEAD = RELEASE >= (1, 15)
CONCENTRIC = {"sequence_parallel_size": 4, "route": {"name": "concentric", "team_size": 2}}


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
