"""The "wallfacer" block of a DeepSpeed JSON is read, and wrong keys are refused by name."""

import base64
import json
import os
import time
import warnings
from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed", exc_type=ImportError)

from wf_deepspeed import config as blocks  # noqa: E402
from wf_deepspeed import cpu  # noqa: E402

RING = {"sequence_parallel_size": 4, "route": {"name": "ring"}}


def ring_block(**keys: object) -> blocks.Block:
    """The block of a ring of 4 ranks with more `keys`."""
    block = blocks.read_block({"wallfacer": {"enabled": True, **RING, **keys}})
    assert block is not None
    return block


def test_keys_of_the_block_are_read() -> None:
    block = ring_block(ulysses_degree=2, layout="contiguous", loss_average="token")
    assert block.sequence_parallel.sequence_parallel_size == 4
    assert block.sequence_parallel.ulysses_degree == 2
    assert block.sequence_parallel.layout == "contiguous"
    assert block.loss_average == "token"
    checkpointing = ring_block(activation_checkpointing={"offload": True}).model.checkpointing
    assert checkpointing is not None and checkpointing.offload


def test_absent_keys_have_their_defaults() -> None:
    block = ring_block()
    assert block.loss_average == "sequence"
    assert block.model.checkpointing is None


@pytest.mark.parametrize("config", [{}, {"wallfacer": {"enabled": False, **RING}}])
def test_an_absent_or_disabled_block_is_none(config: dict) -> None:
    assert blocks.read_block(config) is None


def test_a_block_without_the_key_enabled_is_enabled() -> None:
    assert blocks.read_block({"wallfacer": RING}) is not None


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"sequence_paralel_size": 4}, "did you mean 'sequence_parallel_size'"),
        ({"enable": True}, "did you mean 'enabled'"),
        ({"loss_averge": "token"}, "did you mean 'loss_average'"),
        ({"loss_average": "rank"}, '"sequence" or "token", got \'rank\''),
        ({"enabled": "yes"}, 'must be true or false, got "yes"'),
        ({"layout": "zigzak"}, "layout"),
        ({"activation_checkpointing": {"offlod": True}}, "did you mean 'offload'"),
        ({"activation_checkpointing": {"offload": "cpu"}}, "must be true or false, got 'cpu'"),
        (
            {"sequence_parallel_size": 4, "route": {"name": "concentric", "team_size": 4}},
            "team_size",
        ),
        ({"sequence_parallel_size": 4, "ulysses_degree": 3}, "ulysses_degree"),
    ],
)
def test_a_wrong_key_or_value_is_refused_by_name(block: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        blocks.read_block({"wallfacer": block})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rote": "ring"}, "did you mean 'route'"),
        ({"route": "rnig"}, "did you mean 'ring'"),
        ({"dsp": {"dims": {"time": 1}}}, '"dsp"'),
    ],
)
def test_a_disabled_block_is_still_checked(keys: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        blocks.read_block({"wallfacer": {"enabled": False, **keys}})


def test_a_block_that_is_not_an_object_is_refused() -> None:
    with pytest.raises(ValueError, match=r'"wallfacer" must be a block'):
        blocks.read_block({"wallfacer": 4})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"data_parallel_size": 2}, '"data_parallel_size": 2'),
        ({"sequence_parallel_size": 2}, '"sequence_parallel_size": 2 contradicts'),
        ({"sequence_parallel_size": "4"}, '"sequence_parallel_size": "4" contradicts'),
        (
            {"seq_parallel_communication_data_type": "fp32", "communication_data_type": "bf16"},
            '"seq_parallel_communication_data_type": "fp32" has no effect',
        ),
        ({"compile": {"passes": ["autosp"]}}, "autosp"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op"),
    ],
)
def test_deepspeed_keys_that_would_give_wrong_results_are_refused(
    config: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        blocks.refuse_conflicts(config, ring_block())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size"),
        ({"expert_parallel": {"enabled": True}}, "expert_parallel.enabled"),
        ({"hybrid_engine": {"enabled": True}}, "hybrid_engine.enabled"),
        (
            {"data_efficiency": {"data_sampling": {"enabled": True}}},
            "data_efficiency.data_sampling.enabled",
        ),
        (
            {"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": True}}}},
            "data_efficiency.data_sampling.curriculum_learning.enabled",
        ),
        (
            {"data_efficiency": {"data_routing": {"random_ltd": {"enabled": True}}}},
            "data_efficiency.data_routing.random_ltd.enabled",
        ),
    ],
)
def test_unsupported_deepspeed_keys_are_refused(config: dict, message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        blocks.refuse_conflicts(config, ring_block())


def test_compatible_deepspeed_keys_pass() -> None:
    config = {
        "sequence_parallel_size": 4,
        "zero_optimization": {"stage": 3},
        "activation_checkpointing": {"partition_activations": True},
        "communication_data_type": "fp32",
        "seq_parallel_communication_data_type": "fp32",
        "tensor_parallel": {"autotp_size": 1},
        "compile": {"passes": ["prefetch"]},
    }
    blocks.refuse_conflicts(config, ring_block())


def test_the_sequence_parallel_size_must_divide_the_ranks_of_the_job() -> None:
    assert blocks.data_parallel_size(ring_block(), 8) == 2
    with pytest.raises(ValueError, match=r"4 does not divide the 6 ranks.*\[1, 2, 3, 6\]"):
        blocks.data_parallel_size(ring_block(), 6)


def batch_config(train: object = None, micro: object = None, steps: object = None) -> dict:
    """A DeepSpeed configuration with those of its three batch sizes that are not None."""
    sizes = dict(zip(blocks.BATCH_KEYS, (train, micro, steps), strict=True))
    return {key: value for key, value in sizes.items() if value is not None}


@pytest.mark.parametrize(
    "sizes",
    [(12, 2, 3), (12, 2, None), (12, None, 3), (None, 2, 3), (None, 2, None), (12, None, None)],
)
def test_consistent_batch_sizes_pass(sizes: tuple) -> None:
    blocks.check_batch(batch_config(*sizes), replicas=2)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((24, 2, 3), r'"train_batch_size": 24 .*right would be "train_batch_size": 12'),
        (
            (10, 2, None),
            '10 is no multiple .*"train_micro_batch_size_per_gpu": 2; .* multiple of 4',
        ),
        ((10, None, 3), '10 is no multiple .*"gradient_accumulation_steps": 3; .* multiple of 6'),
        ((3, None, None), "3 is no multiple of data parallel size 2 .* multiple of 2"),
        ((None, None, 3), '"train_batch_size", "train_micro_batch_size_per_gpu" must be given'),
        (("auto", 2, 3), '"train_batch_size" must be a positive integer, got "auto"'),
        ((12, 0, 3), '"train_micro_batch_size_per_gpu" must be a positive integer, got 0'),
    ],
)
def test_inconsistent_batch_sizes_are_refused(sizes: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        blocks.check_batch(batch_config(*sizes), replicas=2)


@pytest.mark.parametrize(
    ("sizes", "autochunk", "expected"),
    [
        ({"train_micro_batch_size_per_gpu": 4}, {}, 4),
        ({"train_batch_size": 12, "gradient_accumulation_steps": 3}, {}, 2),
        ({"train_micro_batch_size_per_gpu": 4}, {"batch_size": 1}, 1),
    ],
)
def test_autochunk_plans_for_the_micro_batch_of_the_config(
    sizes: dict, autochunk: dict, expected: int
) -> None:
    block = blocks.with_batch_size(ring_block(autochunk=autochunk), sizes, 2)
    assert block.model.autochunk is not None and block.model.autochunk.batch_size == expected


def test_a_config_may_be_a_dict_a_file_or_base64(tmp_path) -> None:
    config = {"train_batch_size": 2, "wallfacer": RING}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    encoded = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    assert [blocks.load_config(c) for c in (config, str(path), path, encoded)] == [config] * 4


def test_a_missing_config_file_is_named() -> None:
    with pytest.raises(ValueError, match="there is no file 'nowhere.json'"):
        blocks.load_config("nowhere.json")


def test_stale_locks_of_compilations_are_found_and_named(tmp_path) -> None:
    """Of a job that was killed a minute ago. One of the ranks of this job has a new lock."""
    old, new = (tmp_path / "py311_cpu" / name / "lock" for name in ("cpu_adam", "shm"))
    for lock in (old, new):
        lock.parent.mkdir(parents=True)
        lock.touch()
    minute_ago = time.time() - 60
    os.utime(old, (minute_ago, minute_ago))
    assert cpu.stale_locks(tmp_path) == [old]
    with pytest.warns(RuntimeWarning, match="cpu_adam/lock.* delete the file"):
        cpu.warn_of_stale_locks(tmp_path)


def test_a_lock_that_goes_while_it_is_looked_at_is_not_stale(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda *_: [tmp_path / "shm" / "lock"])
    assert cpu.stale_locks(tmp_path) == []


def test_a_folder_without_locks_gives_no_warning(tmp_path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cpu.warn_of_stale_locks(tmp_path)


def test_the_shared_memory_operator_is_disabled_only_inside_the_context() -> None:
    import deepspeed.ops

    before = dict(deepspeed.ops.__compatible_ops__)
    with cpu.without_shared_memory_op():
        assert deepspeed.ops.__compatible_ops__[cpu.SHARED_MEMORY_OP] is False
    assert deepspeed.ops.__compatible_ops__ == before
