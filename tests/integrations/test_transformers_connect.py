"""A model that exists already, switched by one call and switched back by another."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import wf_transformers  # noqa: E402
from tests.integrations.transformers_models import DECODERS, batch, build  # noqa: E402
from wf_backends import SequenceParallel, SequenceParallelConfig  # noqa: E402
from wf_backends.comm import World  # noqa: E402


@pytest.mark.parametrize("family", DECODERS)
def test_a_model_built_otherwise_is_switched_and_switched_back(family):
    model = build(family, "sdpa", {}).eval()
    sp = SequenceParallel(SequenceParallelConfig(), World(1).comm(0))
    given = {"input_ids": batch()["input_ids"]}
    before = model(**given).logits
    application = wf_transformers.connect(model, sp)
    assert model.config._attn_implementation.startswith("wallfacer")
    ours = model(**wf_transformers.forward_kwargs(model, sp.shard_batch(given))).logits
    torch.testing.assert_close(ours[:, : before.shape[1]], before, rtol=1e-9, atol=1e-11)
    application.remove()
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(**given).logits, before)
