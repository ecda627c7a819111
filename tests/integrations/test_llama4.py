"""Llama 4 on ranks: chunked attention, and queries that grow with the number of their token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

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
    OF_5,
    batch,
    sequence_parallel,
    stay_in_float64,
)
from wf_transformers.attention.function import Attention  # noqa: E402
from wf_transformers.attention.llama4 import SCALED, scaled_by_position  # noqa: E402

INITIALISED = hasattr(transformers, "AttentionMaskInterface")  # not the experts of 4.51
CHUNKS = {"attention_chunk_size": 7, "floor_scale": 3, "attn_scale": 0.5}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 1}
EXPERTS |= {"moe_layers": [1] if INITIALISED else []}
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


@pytest.mark.skipif(not OF_5, reason="transformers 4 counts them in the sequence")
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


def test_queries_of_a_generation_are_scaled_by_the_numbers_of_their_tokens() -> None:
    """Of a prompt of 5 tokens, of which a rank has 3 or 2, and of 2 new ones, which all ranks have.

    Layers without chunks generate: with transformers 5 a Llama 4 of "full_attention" alone.
    """
    layer: Any = nn.Module()
    layer.floor_scale, layer.attn_scale, layer.use_rope = 2, 0.5, False
    numbers = torch.arange(7, dtype=torch.float64)
    scales = 1 + 0.5 * torch.log1p(torch.floor((numbers + 1) / 2))[:, None].expand(7, 8)

    def rank(comm: Any) -> None:
        sp = sequence_parallel(comm)
        attention, cache = Attention(sp), wf_transformers.ShardedCache(sp)
        attention.cache = cache
        for length, new in ((0, 5), (5, 2)):
            cache.length, cache.new = length, new
            expected = scales[length : length + new] if length else sp.shard(scales[:5], 0)
            query = torch.ones(1, 1, *expected.shape).double()
            scaled = scaled_by_position(attention, layer, query, {})
            torch.testing.assert_close(scaled[0, 0], expected, rtol=1e-6, atol=0)

    vars(layer)[SCALED] = True
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
