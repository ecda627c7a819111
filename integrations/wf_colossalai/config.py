"""The JSON file: a "wallfacer" block as in a DeepSpeed JSON, and arguments of ColossalAI."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wf_backends import dsp
from wf_backends._validation import nearest, without_duplicates
from wf_transformers import MODEL_KEYS, ModelOptions

KEY = "wallfacer"
HYBRID = "hybrid"
TOP_LEVEL = (KEY, "colossalai", "optimizer", "gradient_accumulation_steps")


def load(path: str | Path) -> dict[str, Any]:
    """Read the file as a dict, and check the keys of its top level.

    "wallfacer" is the block of a DeepSpeed JSON, "colossalai" has arguments of the plugin.
    "optimizer" and "gradient_accumulation_steps" are for the training loop.
    """
    try:
        config = json.loads(Path(path).read_text(), object_pairs_hook=without_duplicates)
    except FileNotFoundError:
        raise ValueError(f"there is no file {str(path)!r}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # also those of json
        raise ValueError(f"{path} is no JSON that is taken: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold an object {{...}}, got {json.dumps(config)}")
    for key, value in config.items():
        if key not in TOP_LEVEL:
            raise ValueError(
                f'{path}: "{key}" is an unknown key{nearest(key, TOP_LEVEL)} (known: '
                f'{", ".join(TOP_LEVEL)}); arguments of the plugin stand under "colossalai"'
            )
        if key in (KEY, "colossalai") and not isinstance(value, dict):
            raise ValueError(f'{path}: "{key}" must be a block {{...}}, got {json.dumps(value)}')
    return config


def sequence_parallel_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the "wallfacer" block without "enabled" and "loss_average".

    A block that is not enabled is checked here, and becomes sequence_parallel_size 1. The keys of
    an enabled block are checked by the caller, which knows the plugin.
    """
    block = dict(config.get(KEY, {}))
    enabled = block.pop("enabled", KEY in config)
    if not isinstance(enabled, bool):
        raise ValueError(f'"{KEY}.enabled" must be true or false, got {json.dumps(enabled)}')
    if block.pop("loss_average", "sequence") != "sequence":
        raise NotImplementedError(
            f'"{KEY}.loss_average" can only be "sequence" here: ColossalAI averages over '
            "data parallelism with equal weights"
        )
    if enabled:
        return block
    dsp.read_block(ModelOptions.split(block)[0], MODEL_KEYS)
    return {"sequence_parallel_size": 1}
