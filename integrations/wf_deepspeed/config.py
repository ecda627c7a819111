"""Reads the "wallfacer" block of a DeepSpeed JSON and checks it against DeepSpeed's own keys.

This file does not import DeepSpeed: the JSON is checked before a process group or a model exists.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from reprlib import repr as short
from types import MappingProxyType
from typing import Any, Literal, get_args

import hjson

from wf_backends import SequenceParallelConfig, dsp
from wf_backends._validation import without_duplicates
from wf_backends.dsp import Stages
from wf_transformers import MODEL_KEYS, ModelOptions

KEY = "wallfacer"
ENGINE_KEYS = ("enabled", "loss_average")  # of the block, for this engine
MAX_VALUE_LENGTH = 200  # characters of a value in an error
LossAverage = Literal["sequence", "token"]
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
UNSUPPORTED: Mapping[str, bool | int] = MappingProxyType(
    {
        "tensor_parallel.autotp_size": 1,
        "expert_parallel.enabled": False,
        "hybrid_engine.enabled": False,
        "data_efficiency.data_sampling.enabled": False,
        # it acts without the one before
        "data_efficiency.data_sampling.curriculum_learning.enabled": False,
        # drops tokens of a rank's part
        "data_efficiency.data_routing.random_ltd.enabled": False,
    }
)
"""Keys of DeepSpeed -> the largest value that they may have beside the block."""


@dataclass(frozen=True, slots=True)
class Block:
    """The values of the block.

    Attributes:
        sequence_parallel: the keys of SequenceParallelConfig.
        loss_average: "sequence": every micro-batch of every sequence-parallel group has the same
            weight, as in data parallelism. "token": every valid token of an optimizer step has the
            same weight, over data parallelism and gradient accumulation.
        dsp: the model's stages, between which its hidden state is switched; None: no DSP.
        model: keys that any engine has: checkpointing, autochunk, verify, latents.
    """

    sequence_parallel: SequenceParallelConfig
    loss_average: LossAverage = "sequence"
    dsp: Stages | None = None
    model: ModelOptions = ModelOptions()


def load_config(config: Any) -> dict[str, Any]:
    """A DeepSpeed configuration as a dict, from any of the forms that DeepSpeed takes."""
    if isinstance(config, Mapping):
        return dict(config)
    text = str(config)
    if os.path.isfile(text):  # False for base64 that is longer than a file name may be
        try:
            return _parse(Path(text).read_bytes(), f"DeepSpeed config {text!r}")
        except OSError as error:
            raise ValueError(f"DeepSpeed config {text!r} cannot be read: {error}") from None
    try:
        decoded = base64.urlsafe_b64decode(text)
        decoded.decode()
    except (binascii.Error, UnicodeError):
        raise ValueError(
            f"DeepSpeed config must be a dict, the path of a JSON file or its base64; "
            f"there is no file {short(text)}"
        ) from None
    return _parse(decoded, f"DeepSpeed config in base64, {short(text)},")


def _parse(data: bytes, what: str) -> dict[str, Any]:
    """The object in a JSON; errors begin with `what`, the name of its source."""
    try:
        parsed = hjson.loads(data.decode(), object_pairs_hook=without_duplicates)
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} must be UTF-8: {error}") from None
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{what} is no JSON that DeepSpeed takes: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{what} must hold an object {{...}}, got {short(parsed)}")
    return parsed


def read_block(config: Mapping[str, Any]) -> Block | None:
    """The block of a DeepSpeed configuration; None if it is absent or not enabled.

    Raises:
        ValueError: if the block is not a mapping, its name is misspelt, or it has a wrong key or
            value.
    """
    for key in config:  # DeepSpeed and forks have many others, which are not checked
        if key != KEY and get_close_matches(str(key).lower(), [KEY], cutoff=0.8):
            raise ValueError(f'"{key}" is an unknown key; did you mean "{KEY}"?')
    if KEY not in config:
        return None
    block = config[KEY]
    if not isinstance(block, Mapping):
        raise ValueError(f'"{KEY}" must be a block {{...}}, got {_as_json(block)}')
    enabled = block.get("enabled", True)
    if not isinstance(enabled, bool):
        raise ValueError(f'"{KEY}.enabled" must be true or false, got {_as_json(enabled)}')
    average = block.get("loss_average", "sequence")
    if average not in get_args(LossAverage):
        raise ValueError(f'"{KEY}.loss_average" must be "sequence" or "token", got {average!r}')
    others, model = ModelOptions.split({k: v for k, v in block.items() if k not in ENGINE_KEYS})
    try:
        sequence_parallel, stages = dsp.read_block(others, (*ENGINE_KEYS, *MODEL_KEYS))
    except ValueError as error:
        raise ValueError(f'"{KEY}": {error}') from None
    if stages is not None and average != "sequence":
        raise ValueError(
            f'"{KEY}.loss_average": "{average}" contradicts "{KEY}.{dsp.KEY}", under which the '
            f"loss is the model's own; leave it out"
        )
    return Block(sequence_parallel, average, stages, model) if enabled else None


def refuse_conflicts(config: Mapping[str, Any], block: Block) -> None:
    """Refuse DeepSpeed's keys that give wrong results, or are not supported, beside the block."""
    size = block.sequence_parallel.sequence_parallel_size
    if "data_parallel_size" in config:
        raise ValueError(
            f'"data_parallel_size": {config["data_parallel_size"]} beside "{KEY}" makes DeepSpeed '
            f"build a second mesh, which leaves gradients unreduced at ZeRO 0-2; remove it "
            f"(data parallel size = world size / sequence_parallel_size)"
        )
    declared = config.get("sequence_parallel_size", size)
    if declared != size:
        raise ValueError(
            f'"sequence_parallel_size": {_as_json(declared)} contradicts '
            f'"{KEY}.sequence_parallel_size": {size}; make them equal or remove the first'
        )
    dtype = config.get("seq_parallel_communication_data_type")
    if dtype not in (None, config.get("communication_data_type")):
        raise ValueError(
            f'"seq_parallel_communication_data_type": {_as_json(dtype)} has no effect beside '
            f'"{KEY}"; give "communication_data_type": {_as_json(dtype)}'
        )
    if config.get("gradient_allreduce_op", "mean") != "mean":
        raise ValueError(
            f'"gradient_allreduce_op": "{config["gradient_allreduce_op"]}" would scale gradients '
            f'by the world size, the loss counts on "mean"; remove it'
        )
    passes = _nested(config, "compile.passes", [])
    if not isinstance(passes, list):
        raise ValueError(f'"compile.passes" must be a list of names, got {_as_json(passes)}')
    if "autosp" in passes:
        raise ValueError(
            f'"compile.passes": ["autosp"] is DeepSpeed\'s own sequence parallelism; '
            f'remove it or the "{KEY}" block'
        )
    _refuse_unsupported(config)


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    for path, largest in UNSUPPORTED.items():
        value = _nested(config, path, largest)
        if type(value) is not type(largest) or value < 0:
            kind = "true or false" if isinstance(largest, bool) else "a number"
            raise ValueError(f'"{path}" must be {kind}, got {_as_json(value)}')
        if value > largest:
            raise NotImplementedError(
                f'"{path}" together with "{KEY}" is not supported; remove one'
            )


def _nested(config: Mapping[str, Any], path: str, default: Any) -> Any:
    """config["a"]["b"] for the path "a.b"; the default if a part of the path is missing."""
    value: Any = config
    parts = path.split(".")
    for i, part in enumerate(parts):
        if not isinstance(value, Mapping):
            parent = ".".join(parts[:i])
            raise ValueError(f'"{parent}" must be an object {{...}}, got {_as_json(value)}')
        if part not in value:
            return default
        value = value[part]
    return value


def _as_json(value: Any) -> str:
    """A value as JSON, cut if it is long; its repr if JSON has no such value."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        return short(value)
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}..."


def data_parallel_size(block: Block, world_size: int) -> int:
    """The number of sequence-parallel groups in the world."""
    size = block.sequence_parallel.sequence_parallel_size
    if world_size % size:
        raise ValueError(
            f'"{KEY}.sequence_parallel_size": {size} does not divide the {world_size} ranks; '
            f"right would be one of {[d for d in range(1, world_size + 1) if not world_size % d]}"
        )
    return world_size // size


def check_batch(config: Mapping[str, Any], replicas: int) -> None:
    """Check train_batch_size = train_micro_batch_size_per_gpu * accumulation * data parallel size.

    All ranks of a sequence-parallel group work on the same samples: the data parallel size is
    `replicas` = world size / sequence_parallel_size, and the micro batch is that of one group.
    """
    for key in (key for key in BATCH_KEYS if key in config):
        value = config[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f'"{key}" must be a positive integer, got {_as_json(value)}')
    train, micro, steps = (config.get(key) for key in BATCH_KEYS)
    if train is None and micro is None:
        raise ValueError(f'one of "{BATCH_KEYS[0]}", "{BATCH_KEYS[1]}" must be given')
    expected = (micro or 1) * (steps or 1) * replicas
    if train is None or train == expected:
        return
    if micro is not None and steps is not None:
        raise ValueError(
            f'"train_batch_size": {train} is not "train_micro_batch_size_per_gpu": {micro} x '
            f'"gradient_accumulation_steps": {steps} x data parallel size {replicas} (world size / '
            f'sequence_parallel_size); right would be "train_batch_size": {expected}'
        )
    if train % expected:
        factors = "".join(f' x "{key}": {config[key]}' for key in BATCH_KEYS[1:] if key in config)
        raise ValueError(
            f'"train_batch_size": {train} is no multiple of data parallel size {replicas} '
            f"(world size / sequence_parallel_size){factors}; right would be a multiple of "
            f"{expected}"
        )


def with_batch_size(block: Block, config: Mapping[str, Any], replicas: int) -> Block:
    """The block, whose "autochunk" plans for the micro batch of a `check_batch`-ed configuration,
    unless it names a "batch_size" itself."""
    budget = block.model.autochunk
    if budget is None or budget.batch_size is not None:
        return block
    train, micro, steps = (config.get(key, 1) for key in BATCH_KEYS)
    micro = micro if BATCH_KEYS[1] in config else train // (steps * replicas)
    return replace(block, model=replace(block.model, autochunk=replace(budget, batch_size=micro)))
