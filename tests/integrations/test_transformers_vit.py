"""Vision models: the patches of a ViT are sharded after they are embedded, exactly.

Other models whose rows are patches, frames or states are refused unless `shard_between` says where
their sequence begins and ends.
"""

from __future__ import annotations

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
VIDEO = SMALL | {"num_frames": 4, "use_mean_pooling": False}
MAE_DECODER = {
    "decoder_hidden_size": 16,
    "decoder_num_attention_heads": 2,
    "decoder_num_hidden_layers": 1,
}
SOUND = WIDTH | {"intermediate_size": 48, "max_length": 32, "num_mel_bins": 32}
GPT2 = {"n_layer": 1, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SIGLIP: dict[str, Any] = {"vision_config": SMALL, "text_config": SMALL | {"vocab_size": 9}}
PIXELS = {"pixel_values": torch.ones(1, 3, 8, 8)}
UNSHARDED = {
    "dinov2": (tf.Dinov2Model, tf.Dinov2Config(**SMALL), PIXELS),
    "deit": (tf.DeiTModel, tf.DeiTConfig(**SMALL), PIXELS),
    "siglip": (tf.SiglipVisionModel, tf.SiglipVisionConfig(**SMALL), PIXELS),
    "vit_mae": (tf.ViTMAEForPreTraining, tf.ViTMAEConfig(**SMALL, **MAE_DECODER), PIXELS),
    "ast": (tf.ASTModel, tf.ASTConfig(**SOUND), {"input_values": torch.ones(1, 32, 32)}),
    "video_mae": (
        tf.VideoMAEModel,
        tf.VideoMAEConfig(**VIDEO),
        {"pixel_values": torch.ones(1, 4, 3, 8, 8)},
    ),
    "yolos": (
        tf.YolosModel,
        tf.YolosConfig(**SMALL | {"image_size": [8, 8], "num_detection_tokens": 3}),
        PIXELS,
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
    ),
    "siglip_with_text": (
        tf.SiglipModel,
        tf.SiglipConfig(**SIGLIP),
        PIXELS | {"input_ids": torch.ones(1, 4).long(), "position_ids": torch.arange(4)[None]},
    ),
}


@pytest.mark.parametrize("family", UNSHARDED)
def test_a_model_whose_rows_are_not_sharded_is_refused(family: str) -> None:
    """Else attention would take the ranks' copies of the same rows for one long sequence."""
    model_class, config, inputs = UNSHARDED[family]

    def rank(comm: Any) -> None:
        with BUILD_LOCK:
            torch.manual_seed(comm.rank)
            model = model_class(deepcopy(config))  # which attach writes the attention's name into
        with pytest.raises(NotImplementedError, match="shard_between|no layer of|may mix tokens"):
            wf_transformers.attach_model(model, sequence_parallel(comm))
            model(**inputs)

    run_threads(2, rank)


def test_as_many_patches_as_tokens_of_a_rank_are_refused() -> None:
    """The number of rows alone would not tell the patches from the rank's tokens."""
    vision = SMALL | {"vision_use_head": False}  # its head has torch's attention, which is refused
    _, _, inputs = UNSHARDED["siglip_with_text"]

    def rank(sp: Any, name: str) -> None:
        config = tf.SiglipConfig(**SIGLIP | {"vision_config": vision}, attn_implementation=name)
        with BUILD_LOCK:
            model = tf.SiglipModel(config)
        with pytest.raises(NotImplementedError, match="pixel_values beside tokens.*shard_between"):
            wf_transformers.apply(model, sp)
            model(**inputs)

    run_registered(2, rank)


def test_shard_between_shards_another_encoder_exactly() -> None:
    model_class, config, _ = UNSHARDED["dinov2"]
    inputs = {"pixel_values": PIXELS["pixel_values"].double()}

    def build_dinov2() -> Any:
        with BUILD_LOCK:
            torch.manual_seed(1)
            return model_class(deepcopy(config)).double()

    expected = build_dinov2()(**inputs).last_hidden_state

    def rank(comm: Any) -> Tensor:
        model = build_dinov2()
        handle = wf_transformers.attach_model(model, sequence_parallel(comm))
        wf_transformers.shard_between(handle, model.embeddings, model.layernorm)
        return model(**inputs).last_hidden_state.detach()

    for hidden_states in run_threads(2, rank):
        assert_close(hidden_states, expected, "hidden states")
