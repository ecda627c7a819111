"""A ViT whose patches are sharded after they were embedded."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers as tf  # noqa: E402
from transformers import ViTConfig, ViTForImageClassification  # noqa: E402

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    BERT_DROPOUT,
    BUILDING,
    assert_close,
    call,
    gradients,
    sequence_parallel,
)

CONFIG = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "image_size": 8}
PATCHES = {"num_attention_heads": 4, "patch_size": 2, "num_channels": 1, "num_labels": 5}


def build(implementation: str, state: Any = None) -> Any:
    with BUILDING:
        torch.manual_seed(1)
        config = ViTConfig(**CONFIG, **PATCHES, **BERT_DROPOUT, initializer_range=0.2)
        config._attn_implementation = implementation
        model = ViTForImageClassification(config).double().train()
    if state is not None:
        model.load_state_dict(state)
    return model


def images() -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(3, 1, 8, 8, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_vit(size: int, checkpoint: bool) -> None:
    """17 tokens, so that 2 and 4 ranks need padding; gradients are averaged over the ranks."""
    reference = build("sdpa")
    logits = reference(images()).logits
    logits.logsumexp(dim=-1).sum().backward()

    def rank(sp: Any, name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model = build(name, reference.state_dict())
        application = wf_transformers.apply(model, sp)
        if checkpoint:
            words = application.checkpoint_kwargs
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=words)
        out = model(images()).logits
        out.logsumexp(dim=-1).sum().backward()
        return out.detach(), gradients(model)

    results = call(size, rank)
    wanted = gradients(reference)
    for out, grads in results:
        assert_close(out, logits, "logits")
        assert grads.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert_close(sum(grads[name] for _, grads in results) / size, grad, name)


def test_undone_it_is_a_vit_again() -> None:
    reference = build("sdpa")

    def rank(sp: Any, name: str) -> torch.Tensor:
        model = build(name, reference.state_dict())
        wf_transformers.apply(model, sp).remove()
        return model.vit.embeddings(images())

    assert all(out.shape == (3, 17, 32) for out in call(2, rank))


WIDTH = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, **BERT_DROPOUT}
SMALL = WIDTH | {"intermediate_size": 48, "image_size": 8, "patch_size": 4, "num_channels": 3}
VIDEO = SMALL | {"num_frames": 4, "use_mean_pooling": False}
DECODER = {
    "decoder_hidden_size": 16,
    "decoder_num_attention_heads": 2,
    "decoder_num_hidden_layers": 1,
}
SOUND = WIDTH | {"intermediate_size": 48, "max_length": 32, "num_mel_bins": 32}
SIZES = {"n_layer": 1, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CLIPS: dict[str, Any] = {"vision_config": SMALL, "text_config": SMALL | {"vocab_size": 9}}
PIXELS = {"pixel_values": torch.ones(1, 3, 8, 8)}
OTHERS = {
    "dinov2": (tf.Dinov2Model, tf.Dinov2Config(**SMALL), PIXELS),
    "deit": (tf.DeiTModel, tf.DeiTConfig(**SMALL), PIXELS),
    "siglip": (tf.SiglipVisionModel, tf.SiglipVisionConfig(**SMALL), PIXELS),
    "vit_mae": (tf.ViTMAEForPreTraining, tf.ViTMAEConfig(**SMALL, **DECODER), PIXELS),
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
        tf.DecisionTransformerConfig(**SIZES, hidden_size=32, state_dim=3, act_dim=2),
        {
            "states": torch.ones(1, 4, 3),
            "actions": torch.ones(1, 4, 2),
            "returns_to_go": torch.ones(1, 4, 1),
            "timesteps": torch.arange(4)[None],
            "attention_mask": torch.ones(1, 4),
        },
    ),
    "clip": (
        tf.SiglipModel,
        tf.SiglipConfig(**CLIPS),
        PIXELS | {"input_ids": torch.ones(1, 4).long(), "position_ids": torch.arange(4)[None]},
    ),
}


@pytest.mark.parametrize("family", OTHERS)
def test_what_is_not_cut_is_not_attended_to(family: str) -> None:
    """Every rank would attend to the images of all, as if they were one long image."""
    make, config, given = OTHERS[family]

    def rank(comm: Any) -> None:
        with BUILDING:
            torch.manual_seed(comm.rank)
            model = make(deepcopy(config))  # where its attention's name stands
        with pytest.raises(NotImplementedError, match="shard_between|no layer of|may mix tokens"):
            with BUILDING:  # two ranks of one process look for a free name
                wf_transformers.attach_model(model, sequence_parallel(comm))
            model(**given)

    run_threads(2, rank)


def test_as_many_patches_as_tokens_of_a_rank() -> None:
    """Attention would take the patches for its rank's tokens, of which there are as many."""
    vision = SMALL | {"vision_use_head": False}  # its head has torch's attention, which is refused
    _, _, given = OTHERS["clip"]

    def rank(sp: Any, name: str) -> None:
        config = tf.SiglipConfig(**CLIPS | {"vision_config": vision}, attn_implementation=name)
        with BUILDING:
            model = tf.SiglipModel(config)
        with pytest.raises(NotImplementedError, match="pixel_values beside tokens.*shard_between"):
            wf_transformers.apply(model, sp)
            model(**given)

    call(2, rank)


def test_ranks_with_other_images_are_told() -> None:
    def rank(comm: Any) -> None:
        model = build("sdpa")
        with BUILDING:
            wf_transformers.attach_model(model, sequence_parallel(comm))
        with pytest.raises(ValueError, match="pixel_values") as found:
            model(images() + comm.rank)
        assert "read the same samples" in found.value.__notes__[0]

    run_threads(2, rank)


def test_another_encoder_that_is_cut_by_hand() -> None:
    make, config, given = OTHERS["dinov2"]

    def built() -> Any:
        with BUILDING:
            torch.manual_seed(1)
            return make(deepcopy(config)).double()

    doubled = {key: value.double() for key, value in given.items()}
    wanted = built()(**doubled).last_hidden_state

    def rank(comm: Any) -> torch.Tensor:
        model = built()
        with BUILDING:
            handle = wf_transformers.attach_model(model, sequence_parallel(comm))
        wf_transformers.shard_between(handle, model.embeddings, model.layernorm)
        return model(**doubled).last_hidden_state.detach()

    for found in run_threads(2, rank):
        assert_close(found, wanted, "hidden states")
