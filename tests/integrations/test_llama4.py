"""Llama 4 on ranks: chunked attention, and queries that grow with the number of their token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.families import Family, NoFloat32, build  # noqa: E402
from tests.integrations.results import (  # noqa: E402
    Result,
    assert_shares_sum_to,
    run_on_shard,
    with_token_loss,
)
from tests.integrations.transformers_models import (  # noqa: E402
    LLAMA,
    batch,
    sequence_parallel,
    stay_in_float64,
)

OF_5 = hasattr(transformers, "AttentionMaskInterface")
CHUNKS = {"attention_chunk_size": 7, "floor_scale": 3, "attn_scale": 0.5}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 1}
EXPERTS |= {"moe_layers": [1] if OF_5 else []}  # those of transformers 4 are not initialised
LLAMA4 = Family(
    "Llama4ForCausalLM",
    "Llama4TextConfig",
    {
        **LLAMA,
        **CHUNKS,
        **EXPERTS,
        "num_hidden_layers": 4,  # the last one has no rotary embedding and no chunks
        "intermediate_size_mlp": 48,
        "head_dim": 8,
        "pad_token_id": 0,
        "attn_temperature_tuning": True,
    },
)


def assert_exact(size: int, inputs: dict[str, Any], recomputes: bool = False, **call: Any) -> None:
    """`call`: what tells the model on one device its mask."""
    model, ids = build(LLAMA4), inputs["input_ids"]
    with NoFloat32():
        expected = with_token_loss(model, model(ids, use_cache=False, **call).logits, inputs)
    models = [build(LLAMA4) for _ in range(size)]

    def rank(comm: Any) -> Result:
        sp, model = sequence_parallel(comm), models[comm.rank]
        if recomputes:
            model.gradient_checkpointing_enable()  # type: ignore[operator]
        with wf_transformers.attach(model, sp, verify=False), NoFloat32():
            return run_on_shard(model, sp, sp.shard_batch(inputs))

    assert_shares_sum_to(expected, run_threads(size, rank))


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_loss_and_gradients_are_exact(
    size: int, recomputes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if recomputes:
        stay_in_float64(monkeypatch)  # in recomputed layers too
    inputs = batch(2)
    ones = torch.ones_like(inputs["input_ids"])
    assert_exact(size, inputs, recomputes, attention_mask=ones)


@pytest.mark.skipif(not OF_5, reason="transformers 4 knows no documents there")
def test_chunks_count_from_the_start_of_a_document() -> None:
    positions = torch.cat([torch.arange(10), torch.arange(13)])[None]
    inputs = batch(1, cu_seqlens=(0, 10, 23), position_ids=positions)
    assert_exact(4, inputs, position_ids=positions)


def test_verify_passes() -> None:
    models = [build(LLAMA4, "eager").float() for _ in range(2)]

    def rank(comm: Any) -> Any:
        sp, model = sequence_parallel(comm), models[comm.rank]
        return wf_transformers.verify(
            model, sp, lambda: wf_transformers.attach_model(model, sp), "strict"
        )

    assert run_threads(2, rank)[0] is not None


def test_a_model_that_was_not_applied_is_refused() -> None:
    models = [build(LLAMA4) for _ in range(2)]

    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), models[comm.rank]
        with wf_transformers.register(sp, f"wallfacer-{sp.rank}") as registration:
            model.config._attn_implementation = registration.name
            local = wf_transformers.forward_kwargs(model, sp.shard_batch(batch()))
            with pytest.raises(NotImplementedError, match="attn_temperature_tuning: beyond"):
                model(**local)

    run_threads(2, rank)


def test_generation_is_refused() -> None:
    models = [build(LLAMA4).eval() for _ in range(2)]

    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), models[comm.rank]
        with wf_transformers.attach(model, sp, verify=False) as handle:
            with pytest.raises(NotImplementedError, match="chunks, which generation over ranks"):
                wf_transformers.generate(model, handle, batch()["input_ids"])

    run_threads(2, rank)


def test_a_layout_that_follows_from_documents_is_refused() -> None:
    models = [build(LLAMA4) for _ in range(2)]

    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm, "document_zigzag"), models[comm.rank]
        with wf_transformers.attach(model, sp, verify=False):
            local = sp.shard_batch(batch(cu_seqlens=(0, 10, 23)))
            with pytest.raises(NotImplementedError, match='take "zigzag" or "contiguous"'):
                model(**wf_transformers.forward_kwargs(model, local))

    run_threads(2, rank)
