"""torch's FSDP2 and DDP around an attached model train as one device does.

The example's engine (examples/engine_torch.py) runs every file of configs/torch, and the settings
that no file has.
"""

from __future__ import annotations

import importlib
import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from tests.helpers import run_processes  # noqa: E402
from tests.integrations.deepspeed_jobs import (  # noqa: E402
    ROOT,
    dense_loss_sum,
    python,
    tiny_llama,
    token_batches,
)
from tests.long import selected_cases  # noqa: E402
from wf_backends.comm import Communicator  # noqa: E402

pytestmark = pytest.mark.processes

NUM_RANKS, NUM_STEPS = 4, 4
RESTART = NUM_STEPS // 2
RING = {"route": {"name": "ring"}}
UNPUBLISHED: dict[str, dict[str, Any]] = {
    "ddp_data_parallel": {
        "parallelism": "ddp",
        "accumulation": 2,
        "wallfacer": {"sequence_parallel_size": 2, **RING},
    },
    "ddp_no_sequence": {"parallelism": "ddp", "wallfacer": {"sequence_parallel_size": 1}},
    "fsdp_hybrid": {
        "replicas": 2,
        "accumulation": 2,
        "wallfacer": {"sequence_parallel_size": 4, **RING},
    },
    "fsdp_hybrid_data_parallel": {
        "replicas": 2,
        "gradient_clipping": 0.01,
        "wallfacer": {"sequence_parallel_size": 2, **RING},
    },
    "fsdp_mesh_clipped": {
        "recompute": True,
        "gradient_clipping": 0.01,
        "wallfacer": {
            "sequence_parallel_size": 4,
            "route": {"name": "mesh", "rows": 2, "cols": 2},
            "backward_moves": "queries",
        },
    },
}
PUBLISHED = {
    path.stem: json.loads(path.read_text())
    for path in sorted((ROOT / "configs" / "torch").glob("*.json"))
}
SETTINGS = PUBLISHED | UNPUBLISHED
Steps = list[tuple[float, float]]  # (loss, gradient norm) of each
RunsByName = dict[str, Steps]


def engine_module() -> Any:
    """The module examples/engine_torch.py."""
    sys.path.insert(0, str(ROOT / "examples"))
    return importlib.import_module("engine_torch")


def make_engine(config: str, dtype: torch.dtype) -> Any:
    """The example's engine around a tiny model."""
    return engine_module().TorchEngine(config, tiny_llama().to(dtype))


def dtype_of(settings: dict[str, Any]) -> torch.dtype:
    return torch.float32 if settings.get("bf16") else torch.float64


def sequences_per_step(settings: dict[str, Any]) -> int:
    """Of all ranks together."""
    num_groups = NUM_RANKS // settings["wallfacer"]["sequence_parallel_size"]
    return num_groups * settings.get("accumulation", 1)


def batches_of_rank(engine: Any, settings: dict[str, Any], step: int) -> list[Any]:
    """The sequences of this rank's sequence-parallel group in a step."""
    count = sequences_per_step(settings)
    batches = islice(token_batches(step * count), count)
    return list(islice(batches, engine.data_parallel_rank, None, engine.data_parallel_size))


def run_step(engine: Any, batches: list[Any]) -> tuple[float, float]:
    result = engine.step(batches)
    assert result.bytes_sent > 0 or engine.data_parallel_size == NUM_RANKS
    return result.loss, result.grad_norm


def train(comm: Communicator, folder: str) -> tuple[RunsByName, RunsByName]:
    """(all steps, the steps after a restart from the checkpoint of step 2) of every setting."""
    uninterrupted: RunsByName = {}
    resumed: RunsByName = {}
    for config in sorted(Path(folder).glob("*.json")):
        name, settings = config.stem, SETTINGS[config.stem]
        engine, resuming_engine = (make_engine(str(config), dtype_of(settings)) for _ in range(2))
        batches = [batches_of_rank(engine, settings, step) for step in range(NUM_STEPS)]
        uninterrupted[name] = [run_step(engine, batch) for batch in batches[:RESTART]]
        engine.save(Path(folder, name), {"step": RESTART})
        uninterrupted[name] += [run_step(engine, batch) for batch in batches[RESTART:]]
        progress = resuming_engine.load(Path(folder, name, f"step{RESTART}"))
        assert progress == {"step": RESTART}
        resumed[name] = [run_step(resuming_engine, batch) for batch in batches[RESTART:]]
    return uninterrupted, resumed


@pytest.fixture(scope="module")
def runs_by_rank(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> list[tuple[RunsByName, RunsByName]]:
    """What `train` returns on each rank, for the settings of the tests that were selected."""
    folder = tmp_path_factory.mktemp("torch")
    for name in selected_cases(request, SETTINGS):
        (folder / f"{name}.json").write_text(json.dumps(SETTINGS[name]))
    return run_processes(NUM_RANKS, train, str(folder), timeout=280.0, start=python())


def train_on_one_device(settings: dict[str, Any]) -> Steps:
    """The same steps without WallFacer."""
    model = tiny_llama().to(dtype_of(settings))
    optimizer = torch.optim.AdamW(model.parameters(), **settings.get("optimizer", {}))
    clipping = settings.get("gradient_clipping", float("inf"))
    batches, count = token_batches(0), sequences_per_step(settings)
    steps: Steps = []
    for _ in range(NUM_STEPS):
        sums = [dense_loss_sum(model, batch) for batch in islice(batches, count)]
        loss = sum(loss_sum / num_valid for loss_sum, num_valid in sums) / count
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clipping)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((loss.item(), norm.item()))
    return steps


@pytest.mark.parametrize("name", SETTINGS)
def test_losses_and_gradient_norms_are_those_of_one_device_and_a_restart_is_exact(
    name: str, runs_by_rank: list[tuple[RunsByName, RunsByName]]
) -> None:
    """Each loss and gradient norm depends on the updates of all steps before it.

    They were equal to 2e-16 where this was written, but Llama's norms compute in float32 and may
    round differently: hence 1e-7. bfloat16 rounds to 4e-3.
    """
    tolerance = 2e-2 if SETTINGS[name].get("bf16") else 1e-7
    expected = train_on_one_device(SETTINGS[name])
    for uninterrupted, resumed in runs_by_rank:
        for actual_step, expected_step in zip(uninterrupted[name], expected, strict=True):
            assert actual_step == pytest.approx(expected_step, rel=tolerance)
        assert resumed[name] == uninterrupted[name][RESTART:]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"wallfacer": {}, "paralelism": "ddp"}, "paralelism"),
        ({"parallelism": "ddp"}, 'must have "wallfacer"'),
        ({"wallfacer": {}, "parallelism": "zero"}, "'zero'"),
    ],
    ids=["unknown key", "missing key", "unknown value"],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = tmp_path / "wrong.json"
    config.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=message):
        make_engine(str(config), torch.float32)


def test_replicas_are_the_first_dimension_of_the_ranks() -> None:
    mesh_shape = engine_module().mesh_shape
    assert mesh_shape(1, 4) == ((4,), ("shard",))
    assert mesh_shape(2, 8) == ((2, 4), ("replicate", "shard"))


@pytest.mark.parametrize("replicas", [0, 3, -2])
def test_replicas_that_do_not_divide_the_ranks_are_refused(replicas: int) -> None:
    with pytest.raises(ValueError, match=f"divide the 4 ranks, got {replicas}"):
        engine_module().mesh_shape(replicas, 4)


def test_replicas_are_refused_with_ddp() -> None:
    with pytest.raises(ValueError, match="replicas"):
        engine_module().PARALLELISMS["ddp"](tiny_llama(), False, 2)
