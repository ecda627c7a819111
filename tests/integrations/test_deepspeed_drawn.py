"""Random changes of a DeepSpeed JSON are accepted, or refused by the key within a second."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed", exc_type=ImportError)

from tests.drawn_configs import JSON, VALUES, assert_refusal_names_key, mutated  # noqa: E402
from wf_deepspeed import config as blocks  # noqa: E402

ROUTE = {"name": "mesh", "rows": 2, "cols": 2, "order": [1, 0]}
BLOCK = {"sequence_parallel_size": 4, "enabled": True, "loss_average": "token", "route": ROUTE}
OTHER_KEYS = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "sequence_parallel_size": 4,
    "gradient_allreduce_op": "mean",
    "tensor_parallel": {"autotp_size": 1},
    "compile": {"passes": ["prefetch"]},
    "activation_checkpointing": {"partition_activations": False},
    "expert_parallel": {"enabled": False},
    "hybrid_engine": {"enabled": False},
    "data_efficiency": {
        "data_sampling": {"enabled": False, "curriculum_learning": {"enabled": False}}
    },
}
BASES: tuple[dict[str, Any], ...] = (
    {"wallfacer": BLOCK, **OTHER_KEYS},
    {
        "wallfacer": {
            "sequence_parallel_size": 4,
            "activation_checkpointing": {"offload": True},
            "dsp": {
                "dims": {"time": 1, "space": 2},
                "enters": "embed",
                "starts_along": "time",
                "leaves": "head",
                "needs": {"blocks.*": "time"},
            },
        },
        "train_batch_size": 2,
    },
)


def read(config: Any) -> None:
    """Make all checks of the JSON that need no model: on 8 ranks."""
    loaded = blocks.load_config(config)
    block = blocks.read_block(loaded)
    if block is not None:
        blocks.refuse_conflicts(loaded, block)
        blocks.check_batch(loaded, blocks.data_parallel_size(block, 8))


@settings(max_examples=300, deadline=None)
@given(drawn=mutated(BASES, VALUES))
def test_a_changed_key_is_accepted_or_refused_by_name(drawn: tuple[tuple[str, ...], Any]) -> None:
    path, config = drawn
    assert_refusal_names_key((*path, *related_keys(path)), lambda: read(config))


@settings(max_examples=100, deadline=None)
@given(drawn=mutated(BASES, JSON))
def test_a_changed_key_in_base64_is_accepted_or_refused_by_name(
    drawn: tuple[tuple[str, ...], Any],
) -> None:
    path, config = drawn
    text = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    not_json = "is no JSON that DeepSpeed takes"  # such as Infinity
    assert_refusal_names_key((*path, *related_keys(path), not_json), lambda: read(text))


def related_keys(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the keys that a refusal may name instead of `path`.

    The batch sizes and the number of ranks per sequence are checked together: if one of them is
    wrong, the refusal may name any batch size.
    """
    is_batch_size = "batch" in path[0].lower() or path[0] == "gradient_accumulation_steps"
    changes_ranks = path in (("wallfacer",), ("wallfacer", "sequence_parallel_size"))
    return blocks.BATCH_KEYS if is_batch_size or changes_ranks else ()


def test_base64_longer_than_a_file_name_is_read() -> None:
    config = {"wallfacer": {"sequence_parallel_size": 4}, "train_batch_size": 2, "x": "y" * 400}
    text = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    assert blocks.load_config(text) == config


@pytest.mark.parametrize("text", ["3", "null", "[1, 2]", '"words"'])
def test_a_json_that_is_not_an_object_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"ds.json' must hold an object"):
        blocks.load_config(path)
    with pytest.raises(ValueError, match=r"in base64, .* must hold an object"):
        blocks.load_config(base64.urlsafe_b64encode(text.encode()).decode())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"train_batch_size": [1, }', "is no JSON"),
        ('{"a": "é"}'.encode("latin-1"), "must be UTF-8"),
        (b"[" * 100_000, "nested too deep|no JSON"),
        (b'{"wallfacer": {"route": "ring", "route": "mesh"}}', "key 'route' is given twice"),
        (b'{"wallfacer": {}, "wallfacer": {}}', "key 'wallfacer' is given twice"),
    ],
)
def test_a_file_that_is_not_valid_json_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"ds.json' .*({message})"):
        blocks.load_config(path)


@pytest.mark.parametrize(
    ("keys", "refused_key"),
    [
        ({"tensor_parallel": None}, "tensor_parallel"),
        ({"tensor_parallel": {"autotp_size": None}}, "tensor_parallel.autotp_size"),
        ({"hybrid_engine": {"enabled": None}}, "hybrid_engine.enabled"),
        ({"gradient_allreduce_op": None}, "gradient_allreduce_op"),
        ({"sequence_parallel_size": None}, "sequence_parallel_size"),
        ({"train_batch_size": None, "train_micro_batch_size_per_gpu": 1}, "train_batch_size"),
    ],
)
def test_null_is_refused_by_name(keys: dict[str, Any], refused_key: str) -> None:
    config = {"wallfacer": {"sequence_parallel_size": 4}, "train_batch_size": 2} | keys
    with pytest.raises(ValueError, match=f'"{refused_key}".*(null|None)'):
        read(config)
