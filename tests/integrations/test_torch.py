"""torch's own FSDP2 and DDP around a model whose attention is ours train as one device does.

What runs is the example's engine: every file of configs/torch, and some settings more.
"""

from __future__ import annotations

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
    text,
    tiny_llama,
)
from tests.long import selected_cases  # noqa: E402
from wf_backends.comm import Communicator  # noqa: E402

pytestmark = pytest.mark.processes

RANKS, STEPS = 4, 4
PUBLISHED = {path.stem: path for path in sorted((ROOT / "configs" / "torch").glob("*.json"))}
RING = {"route": {"name": "ring"}}
MORE: dict[str, dict[str, Any]] = {
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
SETTINGS = {stem: json.loads(path.read_text()) for stem, path in PUBLISHED.items()} | MORE
Found = dict[str, list[tuple[float, float]]]  # (loss, gradient norm) of every step, by setting


def engine(config: str, dtype: torch.dtype) -> Any:
    """The example's, around a tiny model."""
    sys.path.insert(0, str(ROOT / "examples"))
    from engine_torch import TorchEngine

    return TorchEngine(config, tiny_llama().to(dtype))


def dtype_of(words: dict[str, Any]) -> torch.dtype:
    return torch.float32 if words.get("bf16") else torch.float64


def train(comm: Communicator, folder: str) -> tuple[Found, Found]:
    """All settings, one after another; and from their checkpoints, half-way, once more."""
    whole: Found = {}
    resumed: Found = {}
    for config in sorted(Path(folder).glob("*.json")):
        name, words = config.stem, SETTINGS[config.stem]
        first, again = (engine(str(config), dtype_of(words)) for _ in range(2))
        batches = [next_of(first, words, number) for number in range(STEPS)]
        whole[name] = [step(first, some) for some in batches[: STEPS // 2]]
        first.save(Path(folder, name), {"step": STEPS // 2})
        whole[name] += [step(first, some) for some in batches[STEPS // 2 :]]
        assert again.load(Path(folder, name, f"step{STEPS // 2}")) == {"step": STEPS // 2}
        resumed[name] = [step(again, some) for some in batches[STEPS // 2 :]]
    return whole, resumed


def next_of(engine: Any, words: dict[str, Any], step: int) -> list[Any]:
    """What this rank's sequence-parallel group has in a step."""
    part, parts = engine.data_parallel_rank, engine.data_parallel_size
    several = islice(text(step * sequences(words)), sequences(words))
    return list(islice(several, part, None, parts))


def sequences(words: dict[str, Any]) -> int:
    """Of one step, over all ranks."""
    groups = RANKS // words["wallfacer"]["sequence_parallel_size"]
    return groups * words.get("accumulation", 1)


def step(engine: Any, batches: list[Any]) -> tuple[float, float]:
    result = engine.step(batches)
    assert result.bytes_sent > 0 or engine.data_parallel_size == RANKS
    return result.loss, result.grad_norm


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> list[tuple[Found, Found]]:
    folder = tmp_path_factory.mktemp("torch")
    for name in selected_cases(request, SETTINGS):
        (folder / f"{name}.json").write_text(json.dumps(SETTINGS[name]))
    return run_processes(RANKS, train, str(folder), timeout=280.0, start=python())


def dense(words: dict[str, Any]) -> list[tuple[float, float]]:
    """The same steps on one device, by nothing of ours."""
    model = tiny_llama().to(dtype_of(words))
    optimizer = torch.optim.AdamW(model.parameters(), **words.get("optimizer", {}))
    clipping, found = words.get("gradient_clipping", float("inf")), list[tuple[float, float]]()
    batches, count = text(0), sequences(words)
    for _ in range(STEPS):
        shares = [dense_loss_sum(model, batch) for batch in islice(batches, count)]
        loss = sum(total / valid for total, valid in shares) / count
        assert isinstance(loss, torch.Tensor)
        loss.backward()  # of the mean over sequences
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clipping)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_trains_as_one_device_does(name: str, trained: list[tuple[Found, Found]]) -> None:
    """Each loss and gradient norm depends on the updates of all steps before it.

    Here they are the same to 2e-16; but Llama's norms compute in float32 and may round otherwise.
    """
    tolerance = 2e-2 if SETTINGS[name].get("bf16") else 1e-7
    expected = dense(SETTINGS[name])
    for whole, resumed in trained:
        for ours, theirs in zip(whole[name], expected, strict=True):
            assert ours == pytest.approx(theirs, rel=tolerance)
        assert resumed[name] == whole[name][STEPS // 2 :]  # to the last bit


def test_wrong_words_are_refused(tmp_path: Path) -> None:
    config = tmp_path / "wrong.json"
    for words, told in (
        ({"wallfacer": {}, "paralelism": "ddp"}, "paralelism"),
        ({"parallelism": "ddp"}, "wallfacer"),
        ({"wallfacer": {}, "parallelism": "zero"}, "'zero'"),
    ):
        config.write_text(json.dumps(words))
        with pytest.raises(ValueError, match=told):
            engine(str(config), torch.float32)


def test_replicas_are_as_many_ranks_each() -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    from engine_torch import PARALLELISMS, mesh_shape

    assert mesh_shape(1, 4) == ((4,), ("shard",))
    assert mesh_shape(2, 8) == ((2, 4), ("replicate", "shard"))
    for wrong in (0, 3, -2):
        with pytest.raises(ValueError, match=f"divide the 4 ranks, got {wrong}"):
            mesh_shape(wrong, 4)
    with pytest.raises(ValueError, match="replicas"):
        PARALLELISMS["ddp"](tiny_llama(), False, 2)
