"""The attention function that `register` puts into the registry of transformers, and its name."""

from __future__ import annotations

import runpy
import sys
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

pytest.importorskip("transformers")

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402
from transformers.models.bert import modeling_bert  # noqa: E402
from transformers.models.modernbert import modeling_modernbert  # noqa: E402

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    BERT_HAS_OWN_REGISTRY,
    batch,
    build,
    registered,
    sequence_parallel,
)
from wf_backends import SequenceParallel  # noqa: E402
from wf_backends.comm import World  # noqa: E402
from wf_transformers import replace  # noqa: E402
from wf_transformers.attention.registry import mask_function, register_free  # noqa: E402


@pytest.fixture
def sp() -> SequenceParallel:
    """One rank."""
    return sequence_parallel(World(1).comm(0))


@pytest.mark.parametrize("name", ["sdpa", "eager", "flash_attention_2", "another_librarys"])
def test_a_name_that_is_taken_is_refused(
    name: str, sp: SequenceParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "another_librarys", print)
    with pytest.raises(ValueError, match=f"'{name}' is taken"):
        wf_transformers.register(sp, name)


def test_our_name_can_be_registered_again(sp: SequenceParallel) -> None:
    """For another `sp`; removing the first registration leaves the second."""
    first = wf_transformers.register(sp)
    second = wf_transformers.register(sp)
    first.remove()
    assert ALL_ATTENTION_FUNCTIONS["wallfacer"] is second.attention
    second.remove()
    second.remove()
    assert "wallfacer" not in ALL_ATTENTION_FUNCTIONS


def test_a_registration_ends_with_its_block(sp: SequenceParallel) -> None:
    with wf_transformers.register(sp, "mine"):
        assert "mine" in ALL_ATTENTION_FUNCTIONS.valid_keys()
    assert "mine" not in ALL_ATTENTION_FUNCTIONS


def test_ranks_as_threads_never_share_a_name() -> None:
    def rank(comm: Any) -> list[Any]:
        sp = sequence_parallel(comm)
        return [register_free(sp) for _ in range(50)]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that threads meet inside register_free
    try:
        handles = [handle for handles in run_threads(8, rank) for handle in handles]
    finally:
        sys.setswitchinterval(interval)
    assert len({handle.attention.name for handle in handles}) == len(handles)
    for handle in handles:
        handle.remove()


OWN_REGISTRY = pytest.mark.skipif(
    not BERT_HAS_OWN_REGISTRY, reason="this BERT uses the registry of all models"
)


@OWN_REGISTRY
def test_a_name_is_registered_with_bert_and_removed(sp: SequenceParallel) -> None:
    classes = dict(modeling_bert.BERT_SELF_ATTENTION_CLASSES)
    with wf_transformers.register(sp, "another"):
        assert {**classes, "another": ANY} == modeling_bert.BERT_SELF_ATTENTION_CLASSES
    assert classes == modeling_bert.BERT_SELF_ATTENTION_CLASSES


@OWN_REGISTRY
def test_a_name_that_is_taken_in_bert_is_refused(
    sp: SequenceParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(modeling_bert.BERT_SELF_ATTENTION_CLASSES, "theirs", object)
    with pytest.raises(ValueError, match="'theirs' is taken"):
        wf_transformers.register(sp, "theirs")


def test_a_models_own_mask_functions_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="or_mask_function"):
        mask_function(attention_mask=None, use_vmap=True)


def test_a_prefix_that_sees_all_of_itself_is_refused() -> None:
    """As PaliGemma and Gemma 3 of transformers 5 make one of `token_type_ids`."""
    masks = pytest.importorskip("transformers.masking_utils", reason="needs transformers 5")
    if not hasattr(masks, "blockwise_overlay"):
        pytest.skip("needs transformers 5")
    prefix = masks.blockwise_overlay(torch.tensor([[0, 0, -1, -1]]))
    shown = masks.or_masks(masks.causal_mask_function, prefix)
    with pytest.raises(NotImplementedError, match="block_sequence_ids"):
        mask_function(attention_mask=None, mask_function=shown)


def test_each_layer_has_the_window_of_its_config(sp: SequenceParallel) -> None:
    """Qwen2 with a window from its second layer on."""
    changes = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
    windows = []

    class Recording(SequenceParallel):
        def attention(self, *args: Any, **options: Any) -> torch.Tensor:
            windows.append(options["window_size"])
            return super().attention(*args, **options)

    with wf_transformers.register(Recording(sp.config, sp.comm), "recording"):
        build("qwen2", "recording", changes)(batch(seqlen=8)["input_ids"], use_cache=False)
    assert windows == [(-1, -1), (2, -1)]


@pytest.mark.parametrize(
    ("argument", "window"),
    [({"sliding_window": None}, 8), ({"sliding_window": 3}, 3), ({}, 2)],
    ids=["none", "3", "absent"],
)
def test_a_layers_argument_overrides_its_window(argument: dict[str, Any], window: int) -> None:
    """EXAONE 4 of transformers 5 passes None in layers whose attribute is a window.

    8, the length of the sequence, is no window.
    """
    layer: Any = torch.nn.Module()
    layer.is_causal, layer.sliding_window = True, 2
    q, k, v = torch.randn(3, 1, 2, 8, 4, dtype=torch.float64)
    with registered() as (_, name):
        out, _ = ALL_ATTENTION_FUNCTIONS[name](layer, q, k, v, None, **argument)
    distance = torch.arange(8).unsqueeze(1) - torch.arange(8)
    expected = scaled_dot_product_attention(q, k, v, (0 <= distance) & (distance < window))
    torch.testing.assert_close(out.transpose(1, 2), expected, rtol=0, atol=1e-12)


def test_a_window_on_both_sides_also_of_a_layer_whose_class_fsdp2_derived() -> None:
    derived = type("FSDPModernBertAttention", (modeling_modernbert.ModernBertAttention,), {})
    layer: Any = derived.__new__(derived)
    torch.nn.Module.__init__(layer)
    layer.is_causal = False
    q, k, v = torch.randn(3, 1, 2, 8, 4, dtype=torch.float64)
    with registered() as (_, name):
        out, _ = ALL_ATTENTION_FUNCTIONS[name](layer, q, k, v, None, sliding_window=3)
    distance = torch.arange(8).unsqueeze(1) - torch.arange(8)
    expected = scaled_dot_product_attention(q, k, v, distance.abs() < 3)
    torch.testing.assert_close(out.transpose(1, 2), expected, rtol=0, atol=1e-12)


def test_torchs_attention_is_recognised_behind_a_function_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """finetrainers replaces torch's function, which its own calls, before scripts import us."""
    functional = torch.nn.functional
    monkeypatch.setattr(
        functional,
        "scaled_dot_product_attention",
        lambda *args: scaled_dot_product_attention(*args),
    )
    imported_now = runpy.run_path(replace.__file__)
    with imported_now["InPlaceOfTorchAttention"](lambda q, k, v: q - v):
        out = functional.scaled_dot_product_attention(*torch.ones(3, 1, 2, 8, 4))
    assert not out.any()
