"""Random draws of ranks that share a sequence: dropout, and the noise of NEFTune."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

try:
    from transformers.integrations.neftune import neftune_post_forward_hook  # noqa: E402
except ImportError:  # transformers 4
    from transformers.trainer_utils import neftune_post_forward_hook  # noqa: E402

from tests.helpers import run_threads  # noqa: E402
from tests.integrations.deepspeed_jobs import run_ranks  # noqa: E402
from tests.integrations.transformers_models import batch, build, sequence_parallel  # noqa: E402
from wf_transformers import WholeBatchHooks, attach  # noqa: E402
from wf_transformers.rng import RankRng, uses_rng_in_training  # noqa: E402

CPU = torch.device("cpu")


@pytest.mark.processes
def test_ranks_of_a_sequence_drop_other_elements(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    run_ranks([str(Path(__file__).with_name("draws_worker.py")), str(out)], 2)
    (first, second, after), (its_first, its_second, its_after) = json.loads(out.read_text())
    assert first != its_first and second != its_second
    assert first != second and its_first != its_second
    assert after == its_after


def test_the_common_state_goes_on_where_something_was_drawn() -> None:
    found = []
    for rank in range(2):
        torch.manual_seed(0)
        draws = RankRng(rank)
        for _ in range(2):
            draws.enter(CPU)
            found.append(torch.rand(4))
            draws.leave()
        found.append(torch.rand(4))
    first, second, after, its_first, its_second, its_after = found
    assert torch.equal(after, its_after)
    assert len({tuple(x.tolist()) for x in (first, second, its_first, its_second)}) == 4


def test_where_nothing_is_drawn_nothing_changes() -> None:
    torch.manual_seed(0)
    before, draws = torch.get_rng_state(), RankRng(1)
    draws.enter(CPU)
    draws.leave()
    draws.leave()
    assert torch.equal(torch.get_rng_state(), before)
    assert not uses_rng_in_training(build("gpt2", "eager", {}))
    for more in ({"embd_pdrop": 0.1}, {"attn_pdrop": 0.1}):
        assert uses_rng_in_training(build("gpt2", "eager", more))


def test_neftune_is_as_large_as_on_one_device() -> None:
    """Noise is uniform within alpha / sqrt(tokens x width), of all tokens: 24 x 32."""

    def rank(comm: Any) -> tuple[float, float]:
        model, found = build("llama", "eager", {}), []
        embedding: Any = model.get_input_embeddings()
        WholeBatchHooks(model, attach(model, sequence_parallel(comm), verify=False))
        embedding.neftune_noise_alpha = 10.0
        embedding.register_forward_hook(neftune_post_forward_hook)
        embedding.register_forward_hook(
            lambda _, args, out: found.append(out - embedding.weight[args[0]])
        )
        model(**batch(seqlen=24))
        return float(found[0].abs().max()), embedding.neftune_noise_alpha

    for largest, alpha in run_threads(2, rank):
        assert 0.9 < largest / (10 / (24 * 32) ** 0.5) <= 1.0001
        assert alpha == 10
