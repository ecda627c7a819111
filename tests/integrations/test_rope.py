"""Rotary frequencies that follow from the longest position of a call are those of one device.

Batches below and above the length at which they change follow one another, since rotary modules of
transformers keep what they computed last.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.families import Family, NoFloat32, build, copy_and_spoil  # noqa: E402
from tests.integrations.mean_gradients import assert_mean_gradients  # noqa: E402
from tests.integrations.results import (  # noqa: E402
    Result,
    assert_shares_sum_to,
    run_on_shard,
    with_token_loss,
)
from tests.integrations.test_generation import alone, on_ranks, prompts  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    LLAMA,
    OF_5,
    batch,
    gradients,
    sequence_parallel,
    stay_in_float64,
)
from wf_transformers.attention import positions  # noqa: E402

CHANGE = 18
"""Tokens up to which frequencies are those of short sequences."""
LENGTHS = (17, 23, 18, 19, 17, 29)  # 17 and 18 are padded to 24 tokens on 4 ranks
ORIGINAL = {"max_position_embeddings": 64, "original_max_position_embeddings": CHANGE}
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0]}
MSCALES = {"short_mscale": 1.1, "long_mscale": 1.3, "original_max_position_embeddings": CHANGE}
LONGROPE = {"type": "longrope", **FACTORS}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
PHI3 = {**LLAMA, **ORIGINAL, "rope_scaling": LONGROPE, "pad_token_id": 0}
PHIMOE = {**PHI3, "rope_scaling": {**LONGROPE, **MSCALES}, "num_local_experts": 4}
MODELS = {
    "phi3": Family("Phi3ForCausalLM", "Phi3Config", PHI3),
    "llama": Family(
        "LlamaForCausalLM",
        "LlamaConfig",
        {**LLAMA, "max_position_embeddings": CHANGE, "rope_scaling": DYNAMIC},
    ),
}


PHI_MOE = Family("PhimoeForCausalLM", "PhimoeConfig", PHIMOE, trains=False)


def expected_of(family: Family, batches: list[dict[str, Any]]) -> list[Result]:
    model = build(family)
    return [alone_on(model, inputs) for inputs in batches]


def alone_on(model: nn.Module, inputs: dict[str, Any]) -> Result:
    model.zero_grad()
    with NoFloat32():
        kwargs = {key: inputs[key] for key in ("input_ids", "position_ids") if key in inputs}
        return with_token_loss(model, model(**kwargs).logits, inputs)


def on_shards(family: Family, size: int, batches: list[dict[str, Any]], change: Any = None) -> Any:
    """For each rank the results of its parts of the batches."""
    models = [build(family) for _ in range(size)]

    def rank(comm: Any) -> list[Result]:
        sp, model = sequence_parallel(comm), models[comm.rank]
        with wf_transformers.attach(model, sp, verify=False), NoFloat32():
            model, results = model if change is None else change(model), []
            for inputs in batches:
                model.zero_grad()
                results.append(run_on_shard(model, sp, sp.shard_batch(inputs)))
            return results

    return run_threads(size, rank)


def assert_exact(family: Family, size: int, batches: list[dict[str, Any]], change: Any = None):
    expected = expected_of(family, batches)
    results = zip(*on_shards(family, size, batches, change), strict=True)  # by batch
    for one, of_ranks in zip(expected, results, strict=True):
        assert_shares_sum_to(one, of_ranks)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_batches_on_both_sides_of_the_change_are_exact(name: str, size: int) -> None:
    assert_exact(MODELS[name], size, [batch(2, length) for length in LENGTHS])


@pytest.mark.skipif(not OF_5, reason="its own rotary module counts rows in transformers 4")
def test_a_rotary_module_that_scales_by_the_longest_position_is_exact() -> None:
    assert_exact(PHI_MOE, 4, [batch(2, length) for length in LENGTHS])


@pytest.mark.skipif(OF_5, reason="transformers 5 decorates it")
def test_a_rotary_module_with_an_update_of_its_own_is_refused() -> None:
    model = build(PHI_MOE)

    def rank(comm: Any) -> None:
        with pytest.raises(NotImplementedError, match='PhimoeForCausalLM has rope_type "longrope"'):
            wf_transformers.attach(model, sequence_parallel(comm))

    run_threads(2, rank)


def verify_on_two_ranks() -> Any:
    """On 23 tokens, of which rank 1 has none beyond 18."""
    models = [build(MODELS["phi3"]).float() for _ in range(2)]

    def rank(comm: Any) -> Any:
        sp, model = sequence_parallel(comm), models[comm.rank]
        attach = lambda: wf_transformers.attach_model(model, sp)  # noqa: E731
        return wf_transformers.verify(model, sp, attach, "strict")

    return run_threads(2, rank)[0]


def test_verify_passes() -> None:
    assert verify_on_two_ranks() is not None


def test_verify_finds_frequencies_of_a_ranks_own_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "gather_small", lambda _, x: x)
    with pytest.raises(NotImplementedError, match="o_proj is the first that differs"):
        verify_on_two_ranks()


def recompute(model: Any) -> Any:
    model.gradient_checkpointing_enable()
    return model


@pytest.mark.parametrize("change", [recompute, copy_and_spoil])
def test_recomputed_layers_and_copies_of_a_model_are_exact(
    change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stay_in_float64(monkeypatch)  # in recomputed layers too
    assert_exact(MODELS["phi3"], 2, [batch(1, length) for length in (17, 23, 17)], change)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("border", [6, 4])
def test_the_longest_document_of_a_batch_decides(name: str, border: int) -> None:
    """Of 17 tokens, and of 19."""
    packed = {"cu_seqlens": (0, border, 23), "position_ids": torch.arange(23)[None].clone()}
    packed["position_ids"][:, border:] -= border
    inputs = batch(1, 23, **packed)
    document = torch.arange(23) >= border
    seen = (document[:, None] == document[None]).tril()
    mask = torch.zeros(1, 1, 23, 23).double().masked_fill(~seen, -torch.inf)
    model = build(MODELS[name])
    with NoFloat32():
        tokens = {"input_ids": inputs["input_ids"], "position_ids": packed["position_ids"]}
        logits = model(**tokens, attention_mask=mask).logits
    expected = with_token_loss(model, logits, inputs)
    for results in zip(*on_shards(MODELS[name], 4, [inputs]), strict=True):
        assert_shares_sum_to(expected, results)


@pytest.mark.parametrize("name", MODELS)
def test_whole_batches_are_exact(name: str) -> None:
    batches, reference = [batch(2, length) for length in (17, 23, 17)], build(MODELS[name])
    expected = [alone_on(reference, inputs) for inputs in batches]
    models = [build(MODELS[name]) for _ in range(2)]

    def rank(comm: Any) -> list[dict[str, torch.Tensor]]:
        model, results = models[comm.rank], []
        handle = wf_transformers.attach(model, sequence_parallel(comm), verify=False)
        wf_transformers.WholeBatchHooks(model, handle)
        for inputs in batches:
            model.zero_grad()
            with NoFloat32():
                model(**inputs).loss.backward()
            results.append(gradients(model))
        return results

    for one, grads in zip(expected, zip(*run_threads(2, rank), strict=True), strict=True):
        assert_mean_gradients(grads, one.grads)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [13, 21])
def test_generation_across_the_change_is_exact(name: str, length: int) -> None:
    """Phi-3 computes its cache anew where it crosses the change; others keep it."""
    shown = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 8}
    expected = alone(build(MODELS[name]).eval(), prompts(2, length), **shown)
    for output in on_ranks(3, lambda: build(MODELS[name]), prompts(2, length), **shown):
        assert torch.equal(output.sequences, expected.sequences)
        for logits, expected_logits in zip(output.logits, expected.logits, strict=True):
            torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-9)
