"""A ViT whose patches are sharded after they were embedded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import ViTConfig, ViTForImageClassification  # noqa: E402

import wf_transformers  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    BERT_DROPOUT,
    BUILDING,
    assert_close,
    call,
    gradients,
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
