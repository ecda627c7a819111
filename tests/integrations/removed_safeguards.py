"""Contexts that take a check or a correction away, so that ranks would silently train to another
result. `verify` must find the difference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from wf_transformers import Handle
from wf_transformers.rng import RankRng
from wf_transformers.whole_batches import hooks
from wf_transformers.whole_batches.hooks import WholeBatchHooks

Context = AbstractContextManager[Any]


def ignored_dense_masks() -> Context:
    """A dense attention mask is dropped, so that attention is causal."""

    def without_mask(_: Any, arguments: dict[str, Any], __: Any) -> dict[str, Any]:
        return {name: x for name, x in arguments.items() if name != "attention_mask"}

    return patch.object(hooks, "with_slices", without_mask)


def usable_local_logits() -> Context:
    """In training a loss may use the logits of the rank's tokens as if they were all."""
    return patch.object(WholeBatchHooks, "hides_local_logits", False)


@contextmanager
def allowed_inner_calls() -> Iterator[None]:
    """A model inside one that takes whole batches may be called by itself, with whole rows."""
    with (
        patch.object(hooks, "inner_models", lambda _: ()),
        patch("wf_transformers.attach.inner_models", lambda _: ()),
        patch("wf_transformers.attention.documents.Documents.check_rows", lambda *_: None),
        patch.object(WholeBatchHooks, "_refuse_inner_call", lambda *_: None),
    ):
        yield


def equal_random_states() -> Context:
    """All ranks draw from the state of the Trainer's seed: they drop the same rows of theirs."""
    return patch.object(RankRng, "enter", lambda *_: None)


def noise_of_local_length() -> Context:
    """NEFTune's noise is scaled by the length of the rank's part, not of the sequence."""
    return patch.object(hooks, "scale_noise", lambda *_: None)


def unnoticed_custom_losses() -> Context:
    """A model's own loss is taken for the usual cross entropy."""
    return patch.object(hooks, "custom_loss_reason", lambda *_: None)


def counted_labels_at_padding() -> Context:
    return patch.object(Handle, "without_padded_labels", lambda _, batch: dict(batch))


def constant_softmax_scale() -> Context:
    """A softmax scale that is a parameter is taken as a number: it gets no gradient."""
    function = "wf_backends.parallel.softmax._scale"
    return patch(function, lambda scale, _: float(torch.as_tensor(scale).detach()))
