"""Layers whose indexer chooses keys: packed documents, recomputed layers, refusals.

That each family is exact stands in test_families.py.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.families import FAMILIES, NOT_GENERATING, batch, build  # noqa: E402
from tests.integrations.transformers_models import sequence_parallel  # noqa: E402
from wf_transformers.families import compressors, indexers  # noqa: E402

BORDERS = (0, 9, 23)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "document_zigzag"])
@pytest.mark.parametrize("name", ["glm_moe_dsa", "minimax_m3", "glm5_next", "deepseek_v4"])
def test_packed_documents_choose_as_each_alone_also_when_layers_run_again(
    name: str, layout: str
) -> None:
    ids = batch()["input_ids"]
    model: Any = build(FAMILIES[name], FAMILIES[name].reference)
    models: list[Any] = [build(FAMILIES[name]).train() for _ in range(2)]
    alone = [model(ids[:, start:stop]).logits for start, stop in pairwise(BORDERS)]
    expected = torch.cat(alone, dim=1)
    expected.square().sum().backward()

    def rank(comm: Any) -> tuple[Tensor, Tensor]:
        sp, model = sequence_parallel(comm, layout), models[comm.rank]
        model.gradient_checkpointing_enable()
        with wf_transformers.attach(model, sp, verify=False) as handle:
            local = handle.shard_batch({"input_ids": ids, "cu_seqlens": BORDERS})
            logits = model(**wf_transformers.forward_kwargs(model, local)).logits
            whole = sp.unshard(logits, cu_seqlens=local["cu_seqlens"])[:, : ids.shape[1]]
            whole.square().sum().backward()
        grad = model.get_input_embeddings().weight.grad
        return whole.detach(), sp.sum_over_ranks(grad)

    grad = model.get_input_embeddings().weight.grad
    for logits, summed in run_threads(2, rank):
        # rotary embeddings and norms are in float32
        torch.testing.assert_close(logits, expected.detach(), rtol=0, atol=1e-5)
        torch.testing.assert_close(summed, grad, rtol=0, atol=1e-5 * float(grad.abs().max()))


@pytest.mark.parametrize("name", ["glm_moe_dsa", "minimax_m3", "deepseek_v4"])
def test_positions_may_go_on_from_document_to_document(name: str) -> None:
    """Layers see distances of positions alone."""
    ids, family = batch()["input_ids"], FAMILIES[name]
    models: list[Any] = [build(family, family.reference) for _ in range(3)]
    alone = [models[2](input_ids=ids[:, a:b]).logits for a, b in pairwise(BORDERS)]
    inputs = {"input_ids": ids, "cu_seqlens": BORDERS}

    def rank(comm: Any) -> Tensor:
        sp, model = sequence_parallel(comm), models[comm.rank]
        with wf_transformers.attach(model, sp, verify=False):
            local = sp.shard_batch({**inputs, "position_ids": torch.arange(7, 30)[None]})
            logits = model(**wf_transformers.forward_kwargs(model, local)).logits
        return sp.unshard(logits)[:, : ids.shape[1]]

    for logits in run_threads(2, rank):
        torch.testing.assert_close(logits, torch.cat(alone, 1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NOT_GENERATING)
def test_dropout_and_generation_are_refused(name: str) -> None:
    """Dropout also if one rank alone has it: the others do not wait for that rank."""
    family = FAMILIES[name]
    sizes = {"attention_dropout": 0.1}
    if "text_config" in family.sizes:
        sizes = {"text_config": {**family.sizes["text_config"], **sizes}}
    models = [build(family, **sizes).train(), build(family).train()]
    ids = batch()["input_ids"]
    errors = [
        ((NotImplementedError, ValueError), "got dropout 0.1|dropout_p: 0.1 "),
        (ValueError, r"ranks \[0\] refuse their own|dropout_p: 0.1 "),
    ]

    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), models[comm.rank]
        with wf_transformers.attach(model, sp, verify=False) as handle:
            local = wf_transformers.forward_kwargs(model, sp.shard_batch(batch()))
            error, message = errors[comm.rank]
            with pytest.raises(error, match=message):
                model(**local)
            with pytest.raises(NotImplementedError, match="chooses its keys .*generation"):
                wf_transformers.generate(model.eval(), handle, ids, max_new_tokens=2)

    run_threads(2, rank)


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4"])
def test_a_mask_on_one_rank_alone_is_refused_on_all(name: str) -> None:
    models = [build(FAMILIES[name]) for _ in range(2)]
    errors = "attention_mask of shape .* hides more", r"ranks \[0\] refuse their own arguments"

    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), models[comm.rank]
        with wf_transformers.attach(model, sp, verify=False):
            local = wf_transformers.forward_kwargs(model, sp.shard_batch(batch()))
            if comm.rank == 0:
                local["attention_mask"] = torch.eye(local["input_ids"].shape[1])[None, None].bool()
            with pytest.raises(ValueError, match=errors[comm.rank]):
                model(**local)

    run_threads(2, rank)


def test_indexers_that_take_no_cache_are_refused_when_the_model_is_attached() -> None:
    """Those of transformers before 5.24: they ended in a TypeError of the first forward."""
    layer: Any = type("GlmMoeDsaAttention", (nn.Module,), {"__module__": "transformers.models.glm"})
    model = build(FAMILIES["gemma2"])
    model.extra = layer()
    model.extra.indexer = nn.Identity()

    def rank(comm: Any) -> None:
        with pytest.raises(
            NotImplementedError, match="Identity takes no `cache`.* 5.24 or newer, got"
        ):
            wf_transformers.attach(model, sequence_parallel(comm))

    run_threads(1, rank)


def test_a_removed_handle_leaves_the_model_as_it_was() -> None:
    model, inputs = build(FAMILIES["deepseek_v32"]), {"input_ids": batch()["input_ids"]}
    expected = model(**inputs).logits
    run_threads(1, lambda comm: wf_transformers.attach(model, sequence_parallel(comm)).remove())
    assert torch.equal(model(**inputs).logits, expected)


@pytest.mark.parametrize(
    ("name", "num_modules"),
    [("deepseek_v32", 4 * 3), ("glm5_next", 4), ("deepseek_v4", 5)],  # modules in its indexers
)
def test_modules_of_an_indexer_run_once_however_many_blocks_its_rows_make(
    name: str, num_modules: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeRO 3 gathers a module's parameters at each call, on all ranks; blocks are a rank's own."""
    ids, family = batch()["input_ids"], FAMILIES[name]
    models = [build(family, family.reference) for _ in range(3)]
    expected = models[2](input_ids=ids).logits
    for file in (indexers, compressors):
        monkeypatch.setattr(file, "SCORES_OF_BLOCK", 1)

    def rank(comm: Any) -> tuple[list[str], Tensor]:
        sp, model, calls = sequence_parallel(comm), models[comm.rank], list[str]()
        for name, module in model.named_modules():
            if ".indexer." in name and next(module.parameters(), None) is not None:
                module.register_forward_hook(lambda *_, name=name: calls.append(name))
        with wf_transformers.attach(model, sp, verify=False):
            inputs = wf_transformers.forward_kwargs(model, sp.shard_batch({"input_ids": ids}))
            logits = sp.unshard(model(**inputs).logits)
        return sorted(calls), logits[:, : ids.shape[1]]

    (calls, _), (other_calls, _) = results = run_threads(2, rank)
    assert calls == other_calls == sorted(set(calls)) and len(calls) == num_modules
    for _, logits in results:
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
