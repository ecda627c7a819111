"""Jobs of TRL's trainers: their ranks are forks of a process that has imported TRL."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from tests.integrations.accelerate_jobs import Results, run_both
from tests.integrations.deepspeed_trainer import VOCABULARY

CONCENTRIC = {"sequence_parallel_size": 4, "route": {"name": "concentric", "team_size": 2}}


def trained(
    worker: str, cases: Mapping[str, Mapping[str, Any]], folder: Path
) -> tuple[Results, Results]:
    """With us, and without; `worker` is the module that the ranks run (see `run_both`)."""
    return run_both(f"{worker}.py", cases, folder, f"tests.integrations.{worker}")


def tokenizer(**words: str) -> PreTrainedTokenizerFast:
    """Of the numbers that stand for tokens; `words`: more of its settings."""
    core = Tokenizer(WordLevel({f"t{n}": n for n in range(VOCABULARY)}, unk_token="t0"))
    core.pre_tokenizer = WhitespaceSplit()
    words = {"eos_token": "t1", "pad_token": "t0"} | words
    return PreTrainedTokenizerFast(tokenizer_object=core, **words)
