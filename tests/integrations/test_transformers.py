"""Models of transformers give on ranks the logits, loss and gradients of one device.

The reference is the same model with transformers' sdpa attention, called document by document.
Everything is in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.results import (  # noqa: E402
    Result,
    assert_shares_sum_to,
    run_document_by_document,
    run_on_shard,
)
from tests.integrations.transformers_models import (  # noqa: E402
    BERT_HAS_OWN_REGISTRY,
    DECODERS,
    FAMILIES,
    OF_5,
    SEQLEN,
    assert_close,
    batch,
    build,
    run_registered,
    sequence_parallel,
)
from wf_backends.parallel.loss import count_valid  # noqa: E402
from wf_transformers.batch import LAYERS_KEEP_KEYWORDS  # noqa: E402

DOCUMENTS = (0, 5, 16, SEQLEN)
# families whose models hand keyword arguments on to their attention
HANDS_KEYWORDS_ON = FAMILIES if OF_5 else ["llama", "qwen2", "qwen3", "mistral", "gpt_neox"]


@dataclass(frozen=True)
class Setup:
    """A model, and how it is attached."""

    family: str
    layout: str = "zigzag"
    apply: bool = False
    """Whether `wf_transformers.apply` is called; without it the registered name is all."""
    checkpoint: bool = False
    bert_implementation: str = "eager"
    """What a BERT with a registry of its own is built with; "": the registered name."""
    config_changes: Mapping[str, Any] = field(default_factory=dict)


def assert_exact(
    setup: Setup, size: int, inputs: dict[str, Any], valid: Tensor | None = None
) -> None:
    """On `size` ranks; the logits of the `valid` tokens."""
    reference = build(setup.family, "sdpa", setup.config_changes)
    expected = run_document_by_document(reference, inputs)

    def rank(comm: Any) -> Result:
        sp = sequence_parallel(comm, setup.layout)
        with wf_transformers.register(sp, f"wallfacer-{sp.rank}") as registration:
            model = attached(setup, sp, registration.name, reference.state_dict())
            return run_on_shard(model, sp, sp.shard_batch(inputs))

    assert_shares_sum_to(expected, run_threads(size, rank), valid)


def attached(setup: Setup, sp: Any, name: str, state: Any) -> Any:
    """The setup's model, which computes attention with `sp`, registered as `name`."""
    if setup.family == "bert" and BERT_HAS_OWN_REGISTRY:
        name = setup.bert_implementation or name
    model = build(setup.family, name, setup.config_changes, state)
    if setup.apply:
        wf_transformers.apply(model, sp)
    if setup.checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("family", DECODERS)
def test_decoders_are_exact(family: str, size: int) -> None:
    assert_exact(Setup(family, apply=family == "gpt2"), size, batch(2))


@pytest.mark.parametrize("family", DECODERS)
def test_decoders_are_exact_in_a_contiguous_layout(family: str) -> None:
    assert_exact(Setup(family, layout="contiguous"), 2, batch(seqlen=24))


@pytest.mark.parametrize(("layout", "size"), [("zigzag", 4), ("contiguous", 2)])
@pytest.mark.parametrize("family", DECODERS)
def test_packed_documents_are_exact(family: str, layout: str, size: int) -> None:
    assert_exact(Setup(family, layout, apply=True), size, batch(cu_seqlens=DOCUMENTS))


@pytest.mark.parametrize("family", HANDS_KEYWORDS_ON)
def test_packed_documents_need_no_apply_where_layers_hand_keywords_on(family: str) -> None:
    setup = Setup(family, checkpoint=LAYERS_KEEP_KEYWORDS)
    assert_exact(setup, 2, batch(cu_seqlens=DOCUMENTS))


@pytest.mark.parametrize("family", [*DECODERS, "bert"])
def test_recomputed_layers_see_the_documents_of_their_forward(family: str) -> None:
    setup = Setup(family, apply=True, checkpoint=True)
    assert_exact(setup, 2, batch(cu_seqlens=DOCUMENTS))


@pytest.mark.parametrize("window", [1, 2, 3, 40])  # 40: longer than the sequence
def test_sliding_windows_are_exact(window: int) -> None:
    assert_exact(Setup("mistral", config_changes={"sliding_window": window}), 4, batch())


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("first_layer", [0, 1] if LAYERS_KEEP_KEYWORDS else [0])
def test_windows_from_a_layer_on_are_exact(family: str, first_layer: int) -> None:
    """From layer 0 only in transformers 4, whose reference gives all layers a window."""
    changes = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": first_layer}
    assert_exact(Setup(family, config_changes=changes), 4, batch(2))


@pytest.mark.parametrize(
    "config_changes", [{"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False}]
)
def test_gpt2_scales_scores_as_its_config_says(config_changes: dict[str, Any]) -> None:
    """The reference is eager attention: transformers' sdpa ignores these options."""
    ids = batch(seqlen=24)["input_ids"]
    reference = build("gpt2", "eager", config_changes)
    expected = reference(ids).logits

    def rank(sp: Any, name: str) -> Tensor:
        model = build("gpt2", name, config_changes, reference.state_dict())
        inputs = wf_transformers.forward_kwargs(model, sp.shard_batch({"input_ids": ids}))
        return sp.unshard(model(**inputs).logits.detach())

    assert_close(run_registered(2, rank)[0], expected, "logits")


def test_right_padding_of_ragged_samples_is_exact() -> None:
    mask = (torch.arange(SEQLEN)[None] < torch.tensor([[SEQLEN], [9]])).long()
    assert_exact(Setup("llama"), 4, batch(2, attention_mask=mask), mask.bool())


def test_right_padding_under_full_attention_is_exact() -> None:
    mask = (torch.arange(SEQLEN)[None] < 17).long()
    assert_exact(Setup("bert", apply=True), 2, batch(attention_mask=mask), mask.bool())


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_bert_is_exact(size: int, documents: tuple[int, ...] | None) -> None:
    assert_exact(Setup("bert", apply=True), size, batch(cu_seqlens=documents))


@pytest.mark.parametrize("apply", [False, True])
def test_bert_built_with_the_registered_name_is_exact(apply: bool) -> None:
    inputs = batch(cu_seqlens=DOCUMENTS) if apply else batch(seqlen=24)
    assert_exact(Setup("bert", apply=apply, bert_implementation=""), 2, inputs)


def test_bert_built_with_sdpa_is_exact() -> None:
    setup = Setup("bert", apply=True, bert_implementation="sdpa")
    assert_exact(setup, 2, batch(cu_seqlens=DOCUMENTS))


@pytest.mark.parametrize("family", DECODERS)
def test_the_models_own_loss_is_this_ranks_share(family: str) -> None:
    """A model called with labels and `num_valid`; 1e-6: its loss is in float32."""
    inputs = batch(2, seqlen=24)
    reference = build(family, "sdpa", {})
    expected = run_document_by_document(reference, inputs).loss

    def rank(sp: Any, name: str) -> Tensor:
        model = build(family, name, {}, reference.state_dict())
        local = sp.shard_batch(inputs)
        num_valid = sp.sum_over_ranks(count_valid(local["labels"]))
        output = model(**wf_transformers.forward_kwargs(model, local, num_valid=num_valid))
        share = sp.loss(output.logits, local["labels"])
        torch.testing.assert_close(output.loss.double(), share, rtol=1e-6, atol=0)
        return share.detach()

    assert_close(sum(run_registered(2, rank)), expected, "loss")


@pytest.mark.parametrize("family", DECODERS)
def test_a_causal_mask_of_local_rows_is_recognised(family: str) -> None:
    """Transformers 4 builds one in a call without `forward_kwargs`."""
    ids = batch(seqlen=24)["input_ids"]
    reference = build(family, "sdpa", {})
    expected = reference(ids).logits

    def rank(sp: Any, name: str) -> Tensor:
        model = build(family, name, {}, reference.state_dict())
        local = sp.shard_batch({"input_ids": ids})
        output = model(input_ids=local["input_ids"], position_ids=local["position_ids"])
        return sp.unshard(output.logits.detach())

    assert_close(run_registered(2, rank)[0], expected, "logits")


@pytest.mark.parametrize("family", DECODERS)
def test_forward_kwargs_keep_the_model_from_building_a_mask(family: str) -> None:
    """Both layers get the (b, 1, 1, 1) mask of `forward_kwargs`, not one of (b, 1, s, s)."""

    def rank(sp: Any, name: str) -> list[tuple[int, ...]]:
        attention, mask_shapes = ALL_ATTENTION_FUNCTIONS[name], []

        def spy(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
            mask_shapes.append(mask.shape)
            return attention(module, q, k, v, mask, **options)

        model = build(family, name, {})
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(ALL_ATTENTION_FUNCTIONS, name, spy)
            model(**wf_transformers.forward_kwargs(model, sp.shard_batch(batch(3, seqlen=24))))
        return mask_shapes

    assert run_registered(2, rank) == [[(3, 1, 1, 1)] * 2] * 2


def test_the_number_of_a_steps_valid_labels_is_not_passed_on_to_the_model() -> None:
    """BERT refuses keywords that it does not know."""
    local = {"input_ids": batch()["input_ids"], "valid_labels": 7}
    kwargs = wf_transformers.forward_kwargs(build("bert", "eager", {}), local)
    assert "input_ids" in kwargs and "valid_labels" not in kwargs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_forward_kwargs_for_a_model_without_parameters(dtype: torch.dtype) -> None:
    """The mask has the width of its inputs."""
    kwargs = wf_transformers.forward_kwargs(
        nn.Identity(), {"inputs_embeds": torch.ones(2, 8, 4, dtype=dtype)}
    )
    assert kwargs["attention_mask"].equal(torch.zeros(2, 1, 1, 1, dtype=dtype))


@pytest.mark.skipif(not BERT_HAS_OWN_REGISTRY, reason="apply replaces no module of this BERT")
def test_remove_restores_bert() -> None:
    inputs = batch(seqlen=24)["input_ids"]

    def rank(sp: Any, name: str) -> None:
        attention = ALL_ATTENTION_FUNCTIONS[name]
        model = build("bert", "eager", {})
        expected, modules = model(inputs).logits, [type(module) for module in model.modules()]
        wf_transformers.apply(model, sp).remove()
        assert [type(module) for module in model.modules()] == modules
        assert ALL_ATTENTION_FUNCTIONS[name] is attention
        assert_close(model(inputs).logits, expected, "logits")

    run_registered(1, rank)
