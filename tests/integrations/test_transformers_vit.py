"""Vision models: the patches of a ViT are sharded after they are embedded, exactly.

Other models whose rows are patches, frames or states are refused unless `shard_between` says where
their sequence begins and ends.
"""

from __future__ import annotations

import inspect
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers as tf  # noqa: E402
from transformers import ViTConfig, ViTForImageClassification  # noqa: E402

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.results import (  # noqa: E402
    Result,
    assert_means_are,
    run_backward,
    run_whole_batch,
)
from tests.integrations.transformers_models import (  # noqa: E402
    BERT_DROPOUT,
    BUILD_LOCK,
    assert_close,
    run_registered,
    sequence_parallel,
)

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "image_size": 8}
PATCHES = {"num_attention_heads": 4, "patch_size": 2, "num_channels": 1, "num_labels": 5}


def build(implementation: str, state: Any = None) -> Any:
    with BUILD_LOCK:
        torch.manual_seed(1)
        config = ViTConfig(**SIZES, **PATCHES, **BERT_DROPOUT, initializer_range=0.2)
        config._attn_implementation = implementation
        model = ViTForImageClassification(config).double().train()
    if state is not None:
        model.load_state_dict(state)
    return model


def images() -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(3, 1, 8, 8, generator=generator, dtype=torch.float64)


def run_on_images(model: Any) -> Result:
    logits = model(images()).logits
    return run_backward(model, logits, logits.logsumexp(dim=-1).sum())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_vit_is_exact(size: int, recompute: bool) -> None:
    """Its 17 rows are shared unequally by 2 and 4 ranks, which all have the logits and loss."""
    reference = build("sdpa")
    expected = run_on_images(reference)

    def rank(sp: Any, name: str) -> Result:
        model = build(name, reference.state_dict())
        wf_transformers.apply(model, sp)
        if recompute:
            model.gradient_checkpointing_enable()
        return run_on_images(model)

    assert_means_are(expected, run_registered(size, rank))


def test_vit_takes_whole_batches_with_labels_as_trainers_call_it() -> None:
    batch = {"pixel_values": images(), "labels": torch.tensor([0, 4, 2])}
    models = [build("sdpa") for _ in range(3)]
    expected = run_whole_batch(models[2], batch)

    def rank(comm: Any) -> Result:
        model = models[comm.rank]
        handle = wf_transformers.attach_model(model, sequence_parallel(comm))
        wf_transformers.WholeBatchHooks(model, handle)
        return run_whole_batch(model, batch)

    assert_means_are(expected, run_threads(2, rank))


def test_remove_stops_sharding_the_patches() -> None:
    def rank(sp: Any, name: str) -> Tensor:
        model = build(name)
        wf_transformers.apply(model, sp).remove()
        return model.vit.embeddings(images())

    assert [x.shape for x in run_registered(2, rank)] == [(3, 17, 32)] * 2


@pytest.mark.skipif(
    "head_mask" not in inspect.signature(ViTForImageClassification.forward).parameters,
    reason="transformers 5 has no head masks",
)
def test_head_masks_are_refused() -> None:
    def rank(sp: Any, name: str) -> None:
        model = build(name)
        wf_transformers.apply(model, sp)
        with pytest.raises(NotImplementedError, match="asks for head masks"):
            model(images(), head_mask=torch.tensor([1.0, 0.0, 1.0, 1.0]))

    run_registered(2, rank)


def test_ranks_with_different_images_are_refused() -> None:
    def rank(comm: Any) -> None:
        model = build("sdpa")
        wf_transformers.attach_model(model, sequence_parallel(comm))
        with pytest.raises(ValueError, match="pixel_values") as error:
            model(images() + comm.rank)
        assert "read the same samples" in error.value.__notes__[0]

    run_threads(2, rank)


WIDTH = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, **BERT_DROPOUT}
SMALL = WIDTH | {"intermediate_size": 48, "image_size": 8, "patch_size": 4, "num_channels": 3}
GPT2 = {"n_layer": 1, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SPEECH = {"conv_dim": (8,), "conv_kernel": (4,), "conv_stride": (2,), "layerdrop": 0.0}
SPEECH |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
PIXELS = {"pixel_values": torch.ones(1, 3, 8, 8)}
UNSHARDED = {
    "dinov2_backbone": (tf.Dinov2Backbone, tf.Dinov2Config(**SMALL), PIXELS, "hidden_states=True"),
    "beit": (tf.BeitModel, tf.BeitConfig(**SMALL), PIXELS, "of BeitModel adds a learned bias"),
    "wavlm": (
        tf.WavLMModel,
        tf.WavLMConfig(**WIDTH | SPEECH, intermediate_size=48),
        {"input_values": torch.ones(1, 64)},
        "of WavLMModel adds a learned bias",
    ),
    "timesformer": (
        tf.TimesformerModel,
        tf.TimesformerConfig(**SMALL, num_frames=2),
        {"pixel_values": torch.ones(1, 2, 3, 8, 8)},
        "no layer of TimesformerModel",
    ),
    "vitpose": (
        tf.VitPoseBackbone,
        tf.VitPoseBackboneConfig(**SMALL | {"image_size": [24, 16], "patch_size": [8, 8]}),
        {"pixel_values": torch.ones(1, 3, 24, 16)},
        "none were cut: .*shard_between",
    ),
    "decision": (
        tf.DecisionTransformerModel,
        tf.DecisionTransformerConfig(**GPT2, hidden_size=32, state_dim=3, act_dim=2),
        {
            "states": torch.ones(1, 4, 3),
            "actions": torch.ones(1, 4, 2),
            "returns_to_go": torch.ones(1, 4, 1),
            "timesteps": torch.arange(4)[None],
            "attention_mask": torch.ones(1, 4),
        },
        "shard_between",
    ),
}


@pytest.mark.parametrize("family", UNSHARDED)
def test_a_model_whose_rows_are_not_sharded_is_refused(family: str) -> None:
    """Else attention would take the ranks' copies of the same rows for one long sequence."""
    model_class, config, inputs, message = UNSHARDED[family]

    def rank(comm: Any) -> None:
        with BUILD_LOCK:
            torch.manual_seed(comm.rank)
            model = model_class(deepcopy(config))  # which attach writes the attention's name into
        with pytest.raises(NotImplementedError, match=message):
            wf_transformers.attach_model(model, sequence_parallel(comm))
            model(**inputs)

    run_threads(2, rank)


def test_shard_between_shards_another_encoder_exactly() -> None:
    model_class, config, *_ = UNSHARDED["vitpose"]
    inputs = {"pixel_values": torch.arange(3 * 24 * 16.0).double().sin().view(1, 3, 24, 16)}

    def build_vitpose() -> Any:
        with BUILD_LOCK:
            torch.manual_seed(1)
            return model_class(deepcopy(config)).double()

    expected = build_vitpose()(**inputs).feature_maps[-1]

    def rank(comm: Any) -> Tensor:
        model = build_vitpose()
        handle = wf_transformers.attach_model(model, sequence_parallel(comm))
        wf_transformers.shard_between(handle, model.embeddings, model.layernorm)
        return model(**inputs).feature_maps[-1].detach()

    for features in run_threads(2, rank):
        assert_close(features, expected, "features")
