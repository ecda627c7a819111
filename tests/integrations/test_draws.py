"""Random numbers of ranks that share a sequence: dropout, and the noise of NEFTune."""

from __future__ import annotations

import json
import random
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

try:
    from transformers.integrations.neftune import neftune_post_forward_hook  # noqa: E402
except ImportError:  # transformers 4
    from transformers.trainer_utils import neftune_post_forward_hook  # noqa: E402

from transformers.trainer_utils import set_seed  # noqa: E402

from tests.helpers import run_processes, run_threads  # noqa: E402
from tests.integrations.deepspeed_jobs import python, run_ranks  # noqa: E402
from tests.integrations.transformers_models import batch, build, sequence_parallel  # noqa: E402
from wf_backends import SequenceParallel  # noqa: E402
from wf_transformers import WholeBatchHooks, attach  # noqa: E402
from wf_transformers.rng import RankRng, uses_rng_in_training  # noqa: E402
from wf_transformers.whole_batches.loaders import GROUPS, GroupSizes  # noqa: E402
from wf_transformers.whole_batches.trainer import resuming  # noqa: E402

CPU = torch.device("cpu")


def rng_of(rank: int) -> RankRng:
    """That of one of two ranks."""
    return RankRng(cast(SequenceParallel, SimpleNamespace(rank=rank, size=2)))


@pytest.mark.processes
def test_dropout_differs_between_ranks_and_forwards_and_draws_afterwards_are_equal(
    tmp_path: Path,
) -> None:
    file = tmp_path / "draws.json"
    run_ranks([str(Path(__file__).with_name("draws_worker.py")), str(file)], 2)
    rank_0, rank_1 = json.loads(file.read_text())
    masks = {tuple(mask) for mask in (*rank_0[:3], *rank_1[:3])}
    assert len(masks) == 6
    assert rank_0[3] == rank_1[3]


def test_ranks_draw_differently_inside_and_equally_outside() -> None:
    def draw(rank: int) -> tuple[list[tuple[float, ...]], list[float]]:
        """(what is drawn inside, twice; what is drawn outside, after it)."""
        torch.manual_seed(0)
        rng, inside = rng_of(rank), []
        for _ in range(2):
            rng.enter(torch.nn.Dropout(), CPU)
            inside.append(tuple(torch.rand(4).tolist()))
            rng.leave()
        return inside, torch.rand(4).tolist()

    (inside_0, outside_0), (inside_1, outside_1) = draw(0), draw(1)
    assert outside_0 == outside_1
    assert len({*inside_0, *inside_1}) == 4


def test_the_random_state_is_restored_if_nothing_was_drawn_inside() -> None:
    torch.manual_seed(0)
    state, rng = torch.get_rng_state(), rng_of(1)
    rng.enter(torch.nn.Dropout(), CPU)
    rng.leave()
    rng.leave()  # a second time it does nothing
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("dropout", "expected"),
    [({}, False), ({"embd_pdrop": 0.1}, True), ({"attn_pdrop": 0.1}, True)],
    ids=["none", "embeddings", "attention"],
)
def test_a_model_uses_random_numbers_if_its_config_has_dropout(
    dropout: dict[str, float], expected: bool
) -> None:
    assert uses_rng_in_training(build("gpt2", "eager", dropout)) == expected


def test_noise_of_neftune_is_scaled_by_the_tokens_of_all_ranks() -> None:
    """It is uniform within alpha / sqrt(tokens x width)."""
    seqlen, width, alpha = 24, 32, 10.0

    def run_rank(comm: Any) -> tuple[float, float]:
        """(the largest noise, alpha after the forward)."""
        model = build("llama", "eager", {})
        embedding: Any = model.get_input_embeddings()
        WholeBatchHooks(model, attach(model, sequence_parallel(comm), verify=False))
        embedding.neftune_noise_alpha = alpha
        noise: list[Tensor] = []
        embedding.register_forward_hook(neftune_post_forward_hook)
        embedding.register_forward_hook(
            lambda _, args, out: noise.append((out - embedding.weight[args[0]]).detach())
        )
        model(**batch(seqlen=seqlen))
        return float(noise[0].abs().max()), embedding.neftune_noise_alpha

    bound = alpha / (seqlen * width) ** 0.5
    for largest_noise, alpha_after in run_threads(2, run_rank):
        assert 0.9 * bound < largest_noise <= 1.0001 * bound  # of 384 draws on each rank
        assert alpha_after == alpha


def draws_after_loading(comm: Any) -> list[float]:
    """Draws of ranks with seeds of their own, two of which share a sequence."""
    accelerator = SimpleNamespace(**{GROUPS: GroupSizes([lambda: 2], ExitStack())})
    trainer = SimpleNamespace(
        accelerator=accelerator,
        args=SimpleNamespace(device=CPU),
        is_world_process_zero=lambda: False,
    )
    resuming(trainer, lambda _: set_seed(comm.rank), "checkpoint")
    return draws()


def draws() -> list[float]:
    return [float(torch.rand(1)), random.random(), float(np.random.rand())]


@pytest.mark.processes
def test_ranks_of_a_sequence_draw_alike_after_a_trainer_loaded_random_numbers() -> None:
    """A checkpoint of other ranks has other numbers for two ranks of a sequence."""
    set_seed(0)
    first, second, third, fourth = run_processes(4, draws_after_loading, start=python())
    assert first == second == draws()
    set_seed(2)
    assert third == fourth == draws()
